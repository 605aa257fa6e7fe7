# SPDX-License-Identifier: Apache-2.0
"""An engine that differs from its contract as a test says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from recipe.async_pipeline.installed.engines import EngineTree
from recipe.async_pipeline.tools.contract import engines
from recipe.async_pipeline.tools.contract.engines import Difference, EngineComparison

GONE = Difference(
    name="vllm.v1.request:Request.num_output_tokens",
    change="is missing",
    used_by=("verl_bridge/rollout/vllm/plugin.py",),
    breaks=("version spans",),
    cpu_only=False,
)


def compare_as(monkeypatch: pytest.MonkeyPatch, differences: Sequence[Difference]) -> None:
    """Have every comparison of an engine with its contract find what `differences` holds at that time."""

    def compare(engine: EngineTree, contract: engines.EngineContract) -> EngineComparison:
        return EngineComparison(
            engine=engine, tested=contract.version, checked=140, differences=tuple(differences)
        )

    monkeypatch.setattr(engines, "compare", compare)
