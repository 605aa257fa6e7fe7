# SPDX-License-Identifier: Apache-2.0
"""Objects from before the context are not visited within it, and are again afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from recipe.async_pipeline.verl_bridge.process.garbage import (
    YOUNG,
    freeze_present_objects,
    present_objects_frozen,
)


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    """As in a process that is no test."""
    gc.unfreeze()
    yield
    gc.freeze()


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.mark.slow
def test_only_later_objects_are_collected_within() -> None:
    before = Cycle()
    frozen = weakref.ref(before)
    with present_objects_frozen():
        assert gc.get_freeze_count() > 0
        later = Cycle()
        free = weakref.ref(later)
        del before, later
        gc.collect()
        assert frozen() is not None
        assert free() is None
    gc.collect()
    assert gc.get_freeze_count() == 0
    assert frozen() is None


@pytest.mark.slow
def test_an_error_ends_it_too() -> None:
    threshold = gc.get_threshold()
    with pytest.raises(KeyError), present_objects_frozen():
        assert gc.get_threshold() > threshold
        raise KeyError
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == threshold


@pytest.mark.slow
def test_a_process_collects_less_often_afterwards() -> None:
    threshold = gc.get_threshold()
    try:
        freeze_present_objects()
        assert gc.get_threshold() == (YOUNG, *threshold[1:])
        assert gc.get_freeze_count() > 0
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
