# SPDX-License-Identifier: Apache-2.0
"""What the checks of inputs find in a changed config."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from recipe.async_pipeline.errors import ConfigError
from tests.verl_bridge.conftest import Smoke

Problems = Callable[..., tuple[str, ...]]


@pytest.fixture
def problems(launch: ModuleType, smoke: Smoke) -> Problems:
    """Return a function that returns the problems of a changed config."""

    def of(changes: dict[str, Any]) -> tuple[str, ...]:
        try:
            launch.checked(smoke(changes))
        except ConfigError as error:
            return error.problems
        return ()

    return of
