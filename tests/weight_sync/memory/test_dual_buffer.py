# SPDX-License-Identifier: Apache-2.0
"""Any sequence of fills: what is complete is never written, and versions only move forward."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.memory.dual_buffer import DualBuffer


class Fills(RuleBasedStateMachine):
    """Keeps the two slots itself and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = DualBuffer()
        self.slots: list[int | None] = [None, None]
        self.ready: int | None = None
        """Slot of the newest complete version."""
        self.filling: int | None = None
        self.version = -1
        self.last_slot: int | None = None

    @precondition(lambda self: self.filling is None)
    @rule(jump=st.integers(1, 3))
    def begin(self, jump: int) -> None:
        version = (-1 if self.ready is None else self.slots[self.ready] or 0) + jump
        self.filling = self.buffer.begin_fill(version)
        assert self.filling != self.ready, "what is complete must not be written"
        assert self.filling in (0, 1)
        self.version, self.slots[self.filling] = version, None

    @precondition(lambda self: self.filling is not None)
    @rule()
    def commit(self) -> None:
        assert self.filling is not None
        assert self.buffer.commit() == self.version
        if self.last_slot is not None:
            assert self.filling == 1 - self.last_slot, "the two slots take turns"
        self.slots[self.filling] = self.version
        self.ready = self.last_slot = self.filling
        self.filling = None

    @rule()
    def abort(self) -> None:
        self.buffer.abort()
        self.filling = None

    @precondition(lambda self: self.filling is not None)
    @rule(version=st.integers(0, 20))
    def begin_twice(self, version: int) -> None:
        with pytest.raises(WeightSyncError, match="is still filling"):
            self.buffer.begin_fill(version)

    @precondition(lambda self: self.filling is None and self.ready is not None)
    @rule(back=st.integers(0, 2))
    def begin_older(self, back: int) -> None:
        assert self.ready is not None
        with pytest.raises(WeightSyncError, match="versions only move forward"):
            self.buffer.begin_fill((self.slots[self.ready] or 0) - back)

    @precondition(lambda self: self.filling is None)
    @rule()
    def commit_nothing(self) -> None:
        with pytest.raises(WeightSyncError, match="without begin_fill"):
            self.buffer.commit()

    @invariant()
    def agrees(self) -> None:
        assert self.buffer.ready_slot == self.ready
        assert self.buffer.ready_version == (None if self.ready is None else self.slots[self.ready])
        assert self.buffer.filling_version == (None if self.filling is None else self.version)


TestFills = Fills.TestCase
TestFills.settings = settings(
    max_examples=50, stateful_step_count=20, deadline=None, database=None, derandomize=True
)
