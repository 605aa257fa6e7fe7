# SPDX-License-Identifier: Apache-2.0
"""The run says how much of its weights the engine's own tables explain, at first and after each change."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.core.groups.items import Publication
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import WeightSyncError
from tests.conftest import Load


class Pool:
    """Stand for the replicas; of 100 served elements, the tables explain the given numbers."""

    def __init__(self, *explained: int) -> None:
        self._explained = list(explained)

    async def publish(self, ticket: Any) -> Publication:
        explained = self._explained.pop(0)
        return Publication(
            version=1,
            num_bytes=8,
            gather_s=0.1,
            replicas=1,
            elements_served=100 if explained >= 0 else 0,
            elements_explained=max(0, explained),
            unexplained="" if explained == 100 else "head.weight, a.weight",
        )


@pytest.mark.parametrize(
    ("explained", "said"),
    [
        ((100, 100), ["The engine's own tables explain 100.0 % of the served elements"]),
        ((97, 100), ["tables explain 97.0 %", "tables explain 100.0 %"]),
        ((-1, 95), ["tables explain 95.0 %"]),
    ],
)
def test_the_share_is_printed_once(
    load: Load, monkeypatch: pytest.MonkeyPatch, explained: tuple[int, ...], said: list[str]
) -> None:
    lines = published(load, monkeypatch, *explained)
    assert len(lines) == len(said) and all(part in line for part, line in zip(said, lines, strict=True))
    assert not any("WARNING" in line for line in lines)


@pytest.mark.parametrize("explained", [0, 89])
def test_a_small_share_ends_the_run_unless_a_warning_is_enough(
    load: Load, monkeypatch: pytest.MonkeyPatch, explained: int
) -> None:
    with pytest.raises(
        WeightSyncError, match=rf"^The engine.* {explained}.0 %.*head.weight.*engine_check=warn"
    ):
        published(load, monkeypatch, explained)
    (line,) = published(load, monkeypatch, explained, only_warn=True)
    assert line.startswith("WARNING: ") and f"explain {explained}.0 %" in line and "head.weight" in line


def published(
    load: Load, monkeypatch: pytest.MonkeyPatch, *explained: int, only_warn: bool = False
) -> list[str]:
    module = load("recipe.async_pipeline.verl_bridge.trainer.weight_publisher")
    lines: list[str] = []
    monkeypatch.setattr(module, "say", lines.append)
    publisher: Any = module.WeightPublisher(None, Pool(*explained), None, 1.0, only_warn=only_warn)
    for _ in explained:
        run_virtual(publisher.publish(None))
    return lines
