# SPDX-License-Identifier: Apache-2.0
"""The knobs of weight updates."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.config.weight_sync import SHORT_COMMIT_S, concurrent_loads


@pytest.mark.parametrize(
    ("asked", "replicas", "at_once"),
    [(None, 1, 1), (None, 7, 1), (None, 16, 2), (None, 512, 64), (3, 16, 3), (9, 4, 4)],
)
def test_an_eighth_of_the_replicas_load_at_once_by_default(
    asked: int | None, replicas: int, at_once: int
) -> None:
    assert concurrent_loads(asked, replicas) == at_once
    assert concurrent_loads(asked, replicas, SHORT_COMMIT_S + 0.01) == at_once


@pytest.mark.parametrize(("asked", "at_once"), [(None, 24), (2, 2), (99, 24)])
def test_short_loads_take_no_turns_by_default(asked: int | None, at_once: int) -> None:
    assert concurrent_loads(asked, 24, SHORT_COMMIT_S) == at_once
