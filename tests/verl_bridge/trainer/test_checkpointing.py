# SPDX-License-Identifier: Apache-2.0
"""Errors of a full disk are recognised.

Whole jobs test the rest of the module, see tests/e2e/test_resume.py.
"""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module")
def module(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.trainer.checkpointing")


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(28, "No space left on device"), True),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), True),
        # Torch's error on a tmpfs without a free byte.
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 128 vs 0"), True),
        (RuntimeError("basic_ios::clear: iostream error"), True),
        (TimeoutError("a worker did not answer"), False),
        (ConnectionError("a worker is gone"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_a_full_disk_is_distinguished_from_other_errors(
    module: ModuleType, error: Exception, full: bool
) -> None:
    assert module.is_full(error) is full
