# SPDX-License-Identifier: Apache-2.0
"""What the server asks of vLLM, besides what verl does."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.real_engine


@pytest.mark.parametrize("given", [{}, {"mm_device_do_normalize": None}])
def test_pixels_are_scaled_before_they_reach_the_engine(module: ModuleType, given: dict[str, Any]) -> None:
    """Its own scales would be what `load_format=dummy` has drawn."""

    class Server(module.PipelineVLLMServer):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.config = SimpleNamespace(tensor_model_parallel_size=2)

    if not hasattr(module.AsyncEngineArgs, module.ON_DEVICE):
        pytest.skip("this vLLM never scales pixels")
    Server()._preprocess_engine_kwargs(given)
    assert given[module.ON_DEVICE] is False
