# SPDX-License-Identifier: Apache-2.0
"""The stand-in for Transformer Engine is importable inside its context, of no use, and gone afterwards."""

from __future__ import annotations

import importlib
import sys

import pytest

from recipe.async_pipeline.verl_bridge.workers.megatron.standin import NAME, stand_in

pytestmark = pytest.mark.real_engine


def test_the_stand_in_is_there_for_one_import() -> None:
    assert importlib.util.find_spec(NAME) is None, "with Transformer Engine these tests mean nothing"
    with stand_in():
        pytorch = importlib.import_module(f"{NAME}.pytorch")
        with pytest.raises(ImportError, match="LoRA with Megatron requires it"):
            pytorch.LayerNormLinear(1, 1)
    assert NAME not in sys.modules and f"{NAME}.pytorch" not in sys.modules


def test_it_is_gone_after_an_error() -> None:
    with pytest.raises(ValueError), stand_in():
        raise ValueError
    assert NAME not in sys.modules
