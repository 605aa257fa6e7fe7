# SPDX-License-Identifier: Apache-2.0
"""Every prompt that was drawn has one fate in the end."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.core.tally import Tally
from recipe.async_pipeline.errors import ConservationError


def test_what_does_not_balance_is_rejected() -> None:
    tally = Tally()
    tally.draw("a")
    with pytest.raises(ConservationError, match="drawn twice"):
        tally.draw("a")
    with pytest.raises(ConservationError, match="prompt b is trained, but was never drawn"):
        tally.train("b", 1, 2)
    with pytest.raises(ConservationError, match="1 of 1 prompts were lost, e.g. \\['a'\\]"):
        tally.check()
    tally.train("a", 1, 2)
    with pytest.raises(ConservationError, match="trained prompt a again; step 1 had it"):
        tally.train("a", 2, 2)
    with pytest.raises(ConservationError, match="prompt a is failed, but was trained before"):
        tally.give_up("a", "failed")
    tally.check()


def test_fates_are_counted() -> None:
    tally = Tally()
    for uid in "abcd":
        tally.draw(uid)
    tally.give_up("a", "filtered")
    tally.give_up("b", "expired")
    tally.give_up("c", "expired")
    assert (tally.count("filtered"), tally.count("expired"), tally.count("failed"), tally.count("trained")) == (1, 2, 0, 0)
    assert tally.in_flight() == {"d"}
