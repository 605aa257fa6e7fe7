# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an answer, what becomes of its group, and that a flow full of them loses nothing."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.core.groups.bad_data import (
    HOPELESS,
    KINDS,
    MANY_DROPPED,
    NO_SCORE,
    POLICIES,
    BadData,
    Flaw,
    GroupVerdict,
    Policies,
    flaws_of,
    flaws_of_group,
    is_finite,
)
from recipe.async_pipeline.core.groups.items import Group, Prompt
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import BadDataError
from tests.fakes.trainer import SimTrainer

DROP = {kind: "drop" for kind in KINDS}


def answer(**changes: Any) -> list[Flaw]:
    given: dict[str, Any] = {
        "prompt_tokens": 4,
        "prompt_limit": 8,
        "response_tokens": 2,
        "logprobs": [-0.5, -0.25],
    }
    return flaws_of("k", **{**given, **changes}, writer=lambda token: f"replica {token}")


# What is wrong.


def test_nothing_is_wrong_with_a_sound_answer() -> None:
    assert answer() == answer(logprobs=None) == answer(prompt_tokens=8) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), None, np.float32("nan")])
def test_a_log_prob_that_is_no_finite_number_is_counted_and_its_writer_named(value: Any) -> None:
    (flaw,) = answer(logprobs=[-1.0, value, -1.0, value])
    assert flaw == Flaw(
        "nonfinite_logprobs",
        f"2 of 4 log-probs of response k are not finite, the first {value!r} at token 1",
        "replica 1",
    )
    assert str(flaw).endswith(", written by replica 1")


def test_an_answer_without_a_token_and_a_prompt_with_too_many() -> None:
    assert [f.kind for f in answer(response_tokens=0, logprobs=[])] == ["empty_answer"]
    assert answer(prompt_tokens=9) == [
        Flaw("long_prompt", "the prompt has 9 tokens, and data.max_prompt_length is 8")
    ]


def test_a_group_that_is_incomplete_masked_or_not_scored() -> None:
    def group(**changes: Any) -> list[str]:
        given: dict[str, Any] = {"expected": 2, "present": 2, "unmasked": [3, 0], "unscored": []}
        return [str(flaw) for flaw in flaws_of_group(**{**given, **changes})]

    assert group() == []
    assert group(present=1, unmasked=[3]) == [
        "missing_answers: 1 of 2 responses are missing: the agent loop returned nothing"
    ]
    assert group(present=0, unmasked=[]) == [
        "missing_answers: 2 of 2 responses are missing: the agent loop returned nothing"
    ]
    assert group(unmasked=[0, 0]) == ["all_masked: no token of its 2 responses counts"]
    assert group(unscored=["raised: x"]) == ["no_score: raised: x"]


@pytest.mark.parametrize("value", [0, 1.5, np.float32(2), True])
def test_finite(value: Any) -> None:
    assert is_finite(value)


@pytest.mark.parametrize("value", [None, "1", b"1", float("nan"), float("inf"), [1], {}, object(), 10**400])
def test_not_finite(value: Any) -> None:
    assert not is_finite(value)


# What becomes of it.


def test_defaults_are_the_first_policy_of_each_kind() -> None:
    assert Policies().by_kind("score") == {
        **{kind: choices[0] for kind, choices in POLICIES.items()},
        NO_SCORE: "keep",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_fail_ends_the_run_and_says_who_wrote_it_and_what_would_continue(kind: str) -> None:
    data = BadData({**DROP, kind: "fail"}, attempts=2)
    knob = "reward.failure" if kind == NO_SCORE else f"faults.bad_data.{kind}"
    with pytest.raises(BadDataError) as raised:
        data.judge("u", "p", [Flaw(kind, "why", "replica 3 with version 7")])
    assert str(raised.value) == (
        f"group u is bad: {kind}: why, written by replica 3 with version 7; set {knob}=drop to continue "
        "without such groups"
    )
    assert data.counts[kind] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_drop_tries_again_unless_that_is_hopeless_and_then_quarantines(kind: str) -> None:
    said: list[str] = []
    data = BadData(DROP, 3, said.append)
    flaw = Flaw(kind, "why")
    tries = [data.judge(f"u{i}", "p", [flaw, flaw]) for i in range(1 if kind in HOPELESS else 3)]
    assert tries[:-1] == [GroupVerdict(f"{kind}: why", True)] * (len(tries) - 1)
    assert tries[-1] == GroupVerdict(f"{kind}: why", False)
    assert data.counts[kind] == len(tries), "a group counts once"
    assert data.refuse("p") == GroupVerdict(f"quarantined since group u{len(tries) - 1}: {kind}: why", False)
    assert data.refuse("another") is None
    assert len(said) == len(tries)
    assert said[0].endswith(f" says, 1 group so far: group u0: {kind}: why")


def test_the_user_reads_of_each_flaw_and_of_many_how_many_there_are() -> None:
    said: list[str] = []
    data = BadData({**DROP, "all_masked": "keep"}, 3, said.append)
    for i in range(35):
        data.judge(f"u{i}", f"p{i}", [Flaw("all_masked", "why")])
    counts = [line.partition(" says, ")[2].partition(" so far")[0] for line in said]
    assert counts == ["1 group", *(f"{n} groups" for n in (*range(2, 11), 20, 30))]
    assert said[-1].endswith("30 groups so far: group u29: all_masked: why")


def test_a_sound_answer_in_between_restarts_the_count() -> None:
    data = BadData(DROP, 2)
    flaw = Flaw("empty_answer", "why")
    for _ in range(3):
        assert data.judge("u", "p", [flaw]) == GroupVerdict("empty_answer: why", True)
        assert data.judge("u", "p", []) is None
    assert data.quarantined == {}


def test_what_is_kept_is_counted_only() -> None:
    data = BadData({**DROP, "all_masked": "keep"}, 1)
    assert data.judge("u", "p", [Flaw("all_masked", "why")]) is None
    assert data.metrics()["bad_data/all_masked"] == 1
    assert data.judge("u", "p", [Flaw("all_masked", "why"), Flaw(NO_SCORE, "late")]) == GroupVerdict(
        "no_score: late", False
    )


def test_a_flaw_that_ends_the_run_does_so_next_to_one_that_does_not() -> None:
    data = BadData({**DROP, NO_SCORE: "fail"}, 1)
    with pytest.raises(BadDataError, match="no_score"):
        data.judge("u", "p", [Flaw("empty_answer", "why"), Flaw(NO_SCORE, "late")])


def test_a_run_of_which_most_is_dropped_ends() -> None:
    data = BadData(DROP, 1)
    for i in range(MANY_DROPPED - 1):
        data.judge(f"u{i}", f"p{i}", [Flaw(NO_SCORE, "the judge is down")])
    with pytest.raises(
        BadDataError,
        match=f"{MANY_DROPPED} of {MANY_DROPPED} groups could not be used; the last, because no_score",
    ):
        data.judge("u", "p", [Flaw(NO_SCORE, "the judge is down")])


def test_a_dataset_of_quarantined_prompts_ends_too() -> None:
    data = BadData(DROP, 1)
    data.judge("u", "p", [Flaw(NO_SCORE, "x")])
    with pytest.raises(BadDataError, match="quarantined since group u"):
        for _ in range(MANY_DROPPED):
            data.refuse("p")


def test_the_summary_names_writers_and_prompts() -> None:
    data = BadData(DROP, 1)
    data.judge("u1", "p1", [Flaw("nonfinite_logprobs", "x", "replica 1 with version 4")])
    data.judge("u2", "p2", [Flaw("nonfinite_logprobs", "x", "replica 1 with version 4")])
    data.judge("u3", "p3", [Flaw("empty_answer", "y")])
    assert data.summary() == {
        "groups": {"nonfinite_logprobs": 2, "empty_answer": 1},
        "writers": {"replica 1 with version 4": {"nonfinite_logprobs": 2}},
        "prompts_quarantined": 3,
        "quarantined": [
            {"uid": "u1", "why": "nonfinite_logprobs: x, written by replica 1 with version 4"},
            {"uid": "u2", "why": "nonfinite_logprobs: x, written by replica 1 with version 4"},
            {"uid": "u3", "why": "empty_answer: y"},
        ],
    }
    assert data.metrics()["bad_data/quarantined"] == 3


@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.sampled_from(KINDS), max_size=3)), max_size=60),
    st.integers(1, 4),
)
def test_no_prompt_is_tried_more_often_than_that(script: list[tuple[int, list[str]]], attempts: int) -> None:
    data, in_a_row = BadData(DROP, attempts), Counter[int]()
    for prompt, kinds in script:
        if data.refuse(str(prompt)):
            continue
        verdict = data.judge("u", str(prompt), [Flaw(kind, "x") for kind in kinds])
        in_a_row[prompt] = in_a_row[prompt] + 1 if kinds else 0
        assert in_a_row[prompt] <= attempts
        assert (verdict is None) == (not kinds)
        assert not verdict or verdict.again == (str(prompt) not in data.quarantined)


# A whole flow.


class PoisonedTrainer(SimTrainer):
    """Some prompts come out bad; which, and how often, `flaws(prompt, attempt)` says. There are `prompts`
    of them, again and again.
    """

    def __init__(
        self,
        flaws: Callable[[int, int], Sequence[Flaw]],
        *,
        attempts: int = 2,
        prompts: int = 1000,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        self.bad = BadData(DROP, attempts)
        self.flaws, self.prompts = flaws, prompts
        self.answered: Counter[int] = Counter()

    async def answer(self, prompt: Prompt) -> Group:
        identity = ((prompt.step - 1) * self.groups + prompt.payload) % self.prompts
        verdict = self.bad.refuse(str(identity))
        group = Group(uid=prompt.uid, step=prompt.step, trajectories=())
        if verdict is None:
            group = await super().answer(prompt)
            found = self.flaws(identity, self.answered[identity])
            self.answered[identity] += 1
            verdict = self.bad.judge(prompt.uid, str(identity), found)
        why, again = verdict or ("", False)
        return Group(
            uid=prompt.uid,
            step=prompt.step,
            trajectories=() if found_nothing(why) else group.trajectories,
            flaw=why,
            again=again,
        )

    def rejects(self, group: Group) -> Any:
        return "failed" if group.flaw else super().rejects(group)


def found_nothing(why: str) -> bool:
    return "missing" in why or why.startswith("quarantined")


def test_prompts_that_never_work_have_failed_and_others_take_their_place() -> None:
    trainer = PoisonedTrainer(
        lambda prompt, attempt: [Flaw("missing_answers", "x")] if prompt in (1, 4) else [],
        attempts=3,
        max_lag=2,
        steps=5,
    )
    flow = AsyncTrainingFlow(trainer)
    result = run_virtual(flow.run())
    assert (result.steps, result.groups_trained, result.groups_failed, result.groups_in_flight) == (
        5,
        15,
        2,
        0,
    )
    assert result.groups_drawn == 17
    assert trainer.answered[1] == trainer.answered[4] == 3
    assert result.regenerated == 4
    rejected = [r.fields for r in flow.log.records if r.event == "REJECTED"]
    # Both at the same time.
    assert sorted((f["key"], f["fate"], f["why"]) for f in rejected) == [
        ("p1.1", "failed", "missing_answers: x"),
        ("p2.1", "failed", "missing_answers: x"),
    ]
    assert sum(r.event == "FLAWED" for r in flow.log.records) == 4


def test_one_that_works_the_second_time_is_trained() -> None:
    trainer = PoisonedTrainer(
        lambda prompt, attempt: [Flaw("empty_answer", "x")] if attempt == 0 and prompt % 2 else [], max_lag=1
    )
    result = run_virtual(AsyncTrainingFlow(trainer).run())
    assert (result.groups_failed, result.groups_drawn, result.groups_trained) == (0, 18, 18)
    assert result.regenerated == 9
    assert len(trainer.discarded) == 9


def test_a_poisoned_prompt_is_not_answered_again_in_the_next_epoch() -> None:
    trainer = PoisonedTrainer(
        lambda prompt, attempt: [Flaw(NO_SCORE, "x")] if prompt == 2 else [],
        attempts=1,
        prompts=6,
        max_lag=1,
        steps=6,
    )
    result = run_virtual(AsyncTrainingFlow(trainer).run())
    assert trainer.answered[2] == 1
    assert result.groups_failed > 2
    assert result.groups_trained == 18


@pytest.mark.slow
@pytest.mark.parametrize("order", ["drawn", "finished"])
@pytest.mark.parametrize("straggler", ["wait", "regenerate", "drop", "mask"])
@given(seed=st.integers(0, 2**32), max_lag=st.integers(0, 3), attempts=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_with_any_flaw_every_prompt_has_one_fate(
    order: str, straggler: str, seed: int, max_lag: int, attempts: int
) -> None:
    rng = random.Random(seed)

    def flaws(prompt: int, attempt: int) -> list[Flaw]:
        return [Flaw(rng.choice(KINDS), "x")] if rng.random() < 0.3 else []

    trainer = PoisonedTrainer(
        flaws,
        attempts=attempts,
        prompts=50,
        max_lag=max_lag,
        steps=8,
        answer_s=lambda step, index: rng.choice((0.1, 1.0, 9.0)),
        order=order,
        straggler=straggler,
    )
    flow = AsyncTrainingFlow(trainer)
    result = run_virtual(flow.run())
    assert result.steps == 8
    assert result.groups_trained == 24
    assert result.groups_in_flight == 0
    assert result.groups_drawn == result.groups_trained + result.groups_failed + result.groups_expired
    assert result.lag_max <= max_lag
    assert flow.queue.untrained == 0


def test_a_resumed_process_knows_what_the_previous_one_had_met() -> None:
    before = BadData({kind: "drop" for kind in KINDS}, 2)
    flaw = [Flaw("empty_answer", "why")]
    for prompt in ("p", "p", "q"):
        before.judge("u", prompt, flaw)
    after = BadData({kind: "drop" for kind in KINDS}, 2)
    after.restore(json.loads(json.dumps(before.state())))
    assert after.state() == before.state()
    assert after.refuse("p") == before.refuse("p") and after.refuse("q") is None
    assert (
        after.judge("u", "q", flaw)
        == before.judge("u", "q", flaw)
        == GroupVerdict("empty_answer: why", False)
    )


def test_only_the_last_writers_have_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipe.async_pipeline.core.groups.bad_data.KEPT_WRITERS", 3)
    found = BadData(dict.fromkeys(KINDS, "keep"), 1)
    for version in range(10):
        found.judge(f"g{version}", f"p{version}", [Flaw(KINDS[0], "", writer=f"replica 0 version {version}")])
    assert list(found.summary()["writers"]) == [f"replica 0 version {version}" for version in (7, 8, 9)]
    assert found.counts[KINDS[0]] == 10
