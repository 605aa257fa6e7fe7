# SPDX-License-Identifier: Apache-2.0
"""How tests get at modules that import verl: late, so that those that need none of it stay quick."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from hypothesis import settings

# The same examples in every run, nothing left on disk, no clock: a busy machine must not fail a test.
settings.register_profile("schedules", max_examples=60, deadline=None, database=None, derandomize=True)
settings.load_profile("schedules")

Load = Callable[[str], ModuleType]


@pytest.fixture(scope="session")
def load() -> Iterator[Load]:
    """Imports a module on the CPU platform; the stack's own warnings while it loads are not ours."""

    def load_module(name: str) -> ModuleType:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VERL_PLATFORM", "cpu")
        environment.setenv("VERL_ENGINE_DEVICE", "cuda")
        environment.setenv("HF_HUB_OFFLINE", "1")
        yield load_module
