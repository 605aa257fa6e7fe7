# SPDX-License-Identifier: Apache-2.0
"""The bound follows from pools and batches in flight, and facts are shares of time."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.core.lag.bound import LoopCosts
from recipe.async_pipeline.tools.report.advice_model import Advice, Model, facts_of
from tests.tools.report.accounts import facts_for, run_of, work


def test_the_bound_is_the_largest_of_pools_and_loop() -> None:
    model = Model(
        work={"a": 100.0, "b": 60.0}, devices={"a": 2, "b": 1}, loop=LoopCosts(tail_s=80.0), max_lag=1
    )
    assert model.bound() == 60.0
    assert model.bound(devices={"b": 2}) == 50.0
    assert model.bound(max_lag=0) == 80.0
    assert model.bound(max_lag=0, loop=False) == 60.0
    assert model.gain(50.0) == pytest.approx(0.2)


def test_the_loop_includes_the_forward_passes_of_the_slowest_pool() -> None:
    pools = {
        "train": (2, {"compute_train": 40.0, "compute_logp": 20.0, "compute_ref_logp": 4.0}),
        "ref": (1, {"compute_ref_logp": 10.0}),
    }
    assert facts_for(pools, loop_s=50.0, max_lag=1).model.loop_s() == pytest.approx(50 + 12 / 2)
    assert facts_for(pools, loop_s=0.0, max_lag=1).model.loop_s() == 0.0, "the longest responses are unknown"


def test_facts_are_shares_of_the_time_since_the_first_version() -> None:
    facts = facts_for(
        work(0.6, 1.0, sync=40.0), trainer={"train": 0.5, "generate": 0.3, "logp": 0.2}, start_up_s=50.0
    )
    assert facts.trainer == pytest.approx({"train": 0.5, "generate": 0.3, "logp": 0.2})
    stage, share = facts.most_awaited
    assert stage == "generate" and share == pytest.approx(0.3)
    assert facts.share("train", "sync") == pytest.approx(0.1)
    assert facts.busy("train") == pytest.approx(0.7)
    assert facts.busy("generate") == pytest.approx(1.0)


def test_without_an_account_or_steps_there_are_no_facts() -> None:
    assert facts_of(run_of(work(0.5, 0.5), accounting=None)) is None
    assert facts_of(run_of(work(0.5, 0.5), steps=0)) is None


@pytest.mark.parametrize(
    ("gain", "at_most", "text"),
    [
        (0.21, False, "predicted +21% samples/s"),
        (0.3, True, "predicted at most +30% samples/s"),
        (None, False, ""),
    ],
)
def test_a_prediction_states_whether_it_is_an_upper_bound(
    gain: float | None, at_most: bool, text: str
) -> None:
    assert Advice(rule="r", finding="f", change="c", gain=gain, at_most=at_most).predicted == text
