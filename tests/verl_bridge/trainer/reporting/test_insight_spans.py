# SPDX-License-Identifier: Apache-2.0
"""Each state of each lane becomes one span, reported when the next state begins."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from recipe.async_pipeline.core.events import LogRecord
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


def record(event: str, state: str | None, **fields: Any) -> LogRecord:
    return LogRecord(t=0.0, role="train", event=event, state=state, fields=fields)


def test_each_state_of_a_lane_is_one_span(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("recipe.async_pipeline.verl_bridge.trainer.reporting.insight_spans")
    spans: list[tuple[str, int, int, dict[str, Any]]] = []

    class Tracker:
        @staticmethod
        def enabled() -> bool:
            return True

        @staticmethod
        def trace_span(
            name: str, *, start_time_ns: int, end_time_ns: int, attributes: dict[str, Any]
        ) -> None:
            spans.append((name, start_time_ns, end_time_ns, attributes))

    monkeypatch.setattr(module, "RLInsightLogger", Tracker)
    clock = count(1)

    def submit(function: Callable[..., None], *args: Any) -> None:
        function(*args)

    states = module.InsightStates(submit, lambda: next(clock))
    for event, state in (
        ("START", "WAITING_INPUT"),
        ("ITEM", "WAITING_RESOURCE"),
        ("LEASE", "RUNNING"),
        ("TRAINED", "RUNNING"),
        ("FINISH", "WAITING_INPUT"),
    ):
        states(record(event, state, step=3))
    states(record("LEASE", "RUNNING", step=3, lane=1))
    states(LogRecord(t=0.0, role="flow", event="DONE", state="DONE", fields={}))
    facts = {"role": "train", "lane": 0, "step": 3}
    assert spans == [
        ("train: waits for input", 1, 2, facts),
        ("train: waits for devices", 2, 3, facts),
        ("train: runs", 3, 4, facts),
    ]
    assert module.is_enabled()
