# SPDX-License-Identifier: Apache-2.0
"""Rows have different places, also in data without an index."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conftest import Load

pytestmark = pytest.mark.real_engine


def row(text: str, **more: Any) -> dict[str, Any]:
    return {"raw_prompt": [{"role": "user", "content": text}], "index": 0, **more}


def test_an_index_of_the_data_is_the_place(load: Load) -> None:
    place_of = load("recipe.async_pipeline.verl_bridge.agent_loop.row_place").place_of
    assert place_of(row("a", extra_info={"index": 0})) == 0
    assert place_of(row("a", extra_info={"index": np.int64(7)}, index=np.int64(7))) == 7
    assert place_of(row("a", extra_info={"index": "q-3"}, index="q-3")) == "q-3"


def test_without_an_index_prompt_and_task_are_the_place(load: Load) -> None:
    place_of = load("recipe.async_pipeline.verl_bridge.agent_loop.row_place").place_of
    places = [
        place_of(one)
        for one in (
            row("a"),
            row("b"),
            row("a", extra_info={"task": {"size": 4}}),
            row("a", extra_info={"task": {"size": 5}}),
        )
    ]
    assert len(set(places)) == 4
    assert places[0] == place_of(row("a", extra_info={"split": "train"})), "nothing else changes it"
