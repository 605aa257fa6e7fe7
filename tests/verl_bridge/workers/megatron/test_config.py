# SPDX-License-Identifier: Apache-2.0
"""The config permits float32, and otherwise what verl's permits."""

from __future__ import annotations

import warnings

import pytest

from tests.conftest import Load

pytestmark = pytest.mark.real_engine
MODULE = "recipe.async_pipeline.verl_bridge.workers.megatron.config"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_permitted(load: Load, dtype: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = load(MODULE).Float32EngineConfig(dtype=dtype)
    assert config.dtype == dtype
    assert config.sequence_parallel is False, "verl's own checks ran: it is off without tensor parallelism"


def test_refused(load: Load) -> None:
    with pytest.raises(AssertionError, match="float64"):
        load(MODULE).Float32EngineConfig(dtype="float64")
