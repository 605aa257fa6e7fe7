# SPDX-License-Identifier: Apache-2.0
"""A run that is killed at any moment, and resumes from its last checkpoint, as often as that happens.

Killed means what SIGKILL means: from one record to the next nothing is written any more. What the process did
beyond its last checkpoint is lost, and of its ledger the end may be.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.errors import ConservationError
from recipe.async_pipeline.tools.ledger.audit import audit, valid
from tests.fakes.lives import Life, Records, check, lives, steps_of, written_and_read
from tests.fakes.random_runs import ANSWER_TIMES, random_runs
from tests.fakes.trainer import WITH_CRITIC, WITH_TEACHER, SimCheckpoint, SimTrainer


@pytest.mark.slow
@settings(max_examples=100)
@given(
    run=random_runs(
        "draw",
        "logp",
        "ref_logp",
        "update",
        "gather",
        "publish",
        "finish",
        "assemble",
        "critic",
        "save",
        "restore",
        min_steps=2,
    ),
    times=ANSWER_TIMES,
    save_every=st.integers(1, 3),
    kills=st.lists(st.integers(1, 600), min_size=1, max_size=4),
    lost=st.integers(0, 9),
)
def test_whenever_it_is_killed_no_prompt_is_lost_and_none_trained_twice(
    run: dict[str, Any], times: list[float], save_every: int, kills: list[int], lost: int
) -> None:
    def make(resume: SimCheckpoint | None = None) -> SimTrainer:
        return SimTrainer(
            **run,
            answer_s=lambda step, index: times[(step * 7 + index) % len(times)],
            save_every=save_every,
            resume=resume,
        )

    last, ledger = lives(make, kills, lost)
    check(audit(valid(ledger)), steps=run["steps"], groups=run["groups"], max_lag=run["max_lag"])
    assert last.flow.result().steps == run["steps"]
    if run["order"] == "drawn" and run["straggler"] == "wait":
        _, undisturbed = lives(make, [])
        assert steps_of(ledger) == steps_of(undisturbed)


def killed_everywhere(**settings: Any) -> tuple[Records, list[Records]]:
    """A run that is left alone, and one for each of its records, killed after that one."""

    def make(resume: SimCheckpoint | None = None) -> SimTrainer:
        return SimTrainer(resume=resume, **settings)

    whole = Life(make())
    moments = len(whole.ledger) + len(whole.flow.log.records)
    return whole.ledger, [lives(make, [moment])[1] for moment in range(1, moments)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"max_lag": 0, "save_every": 1},
        {
            "max_lag": 1,
            "save_every": 2,
            "roles": WITH_CRITIC,
            "places": {"critic": "critic"},
            "filtered": lambda uid: uid == "p2.1",
        },
        {
            "max_lag": 3,
            "save_every": 1,
            "order": "finished",
            "straggler": "drop",
            "answer_s": lambda step, index: 9.0 if index == 0 else 0.3,
            "costs": {"assemble": 0.25, "draw": 0.25},
        },
        {
            "max_lag": 4,
            "save_every": 3,
            "sync_every": 3,
            "answer_s": lambda step, index: 0.1,
            "costs": {"logp": 2.0},
        },
        {
            "max_lag": 4,
            "save_every": 1,
            "costs": {"assemble": 6.0},
            "filtered": lambda uid: uid in ("p2.0", "p3.1"),
        },
    ],
    ids=["on_policy", "one_step_off", "fully_async", "n_step_ahead", "slow_join"],
)
def test_killed_after_each_of_its_records(settings: dict[str, Any]) -> None:
    whole, ledgers = killed_everywhere(steps=3, groups=2, **settings)
    for ledger in ledgers:
        check(audit(valid(ledger)), steps=3, groups=2, max_lag=settings["max_lag"])
        if "order" not in settings:
            assert steps_of(ledger) == steps_of(whole)


def test_what_was_finished_is_not_answered_again() -> None:
    """Groups that wait for a step, groups that steps have taken, and groups without a decision."""

    def make(resume: SimCheckpoint | None = None) -> SimTrainer:
        return SimTrainer(
            max_lag=4,
            steps=6,
            groups=2,
            save_every=2,
            answer_s=lambda step, index: 0.1,
            costs={"update": 5.0, "logp": 3.0},
            resume=resume,
        )

    first = Life(make())
    checkpoint = written_and_read(first.checkpoints[0])
    finished = {group.uid for group in checkpoint.flow.finished()}
    assert len(finished) >= 6, "generation was far ahead"
    second = Life(make(resume=checkpoint))
    again = {record["uid"] for record in second.ledger if record["kind"] == "again"}
    assert again.isdisjoint(finished)
    assert again == set(checkpoint.flow.in_flight())


def test_what_the_teacher_has_read_is_not_read_again() -> None:
    def make(resume: SimCheckpoint | None = None) -> SimTrainer:
        return SimTrainer(
            max_lag=4,
            steps=6,
            groups=2,
            save_every=2,
            answer_s=lambda step, index: 0.1,
            costs={"update": 5.0, "teacher": 12.0},
            roles=WITH_TEACHER,
            resume=resume,
        )

    checkpoint = written_and_read(Life(make()).checkpoints[0])
    groups = list(checkpoint.flow.finished())
    read = {group.uid for group in groups if group.taught}
    assert read and read != {group.uid for group in groups}, "some are with the teacher"
    trainer = make(resume=checkpoint)
    assert Life(trainer).flow.result().steps == 6
    assert read.isdisjoint(trainer.asked)
    assert all(group.taught for batch in trainer.trained for group in batch.groups)


def test_versions_continue_where_they_were() -> None:
    def make(resume: SimCheckpoint | None = None) -> SimTrainer:
        return SimTrainer(max_lag=2, steps=7, save_every=4, sync_every=3, resume=resume)

    resumed = Life(make(resume=Life(make()).checkpoints[0]))
    assert [p.version for p in resumed.flow.publications] == [4, 6, 7], (
        "of a step that is not published otherwise"
    )
    assert [batch.step for batch in resumed.trainer.trained] == [5, 6, 7]


def test_a_run_that_is_over_only_publishes() -> None:
    def make(resume: SimCheckpoint | None = None) -> SimTrainer:
        return SimTrainer(max_lag=2, steps=3, save_every=3, resume=resume)

    over = Life(make(resume=Life(make()).checkpoints[-1]))
    assert over.trainer.trained == []
    assert over.flow.result().groups_trained == 9
    assert [p.version for p in over.flow.publications] == [3]


def test_a_checkpoint_that_holds_more_than_is_left_to_train() -> None:
    before = Life(SimTrainer(max_lag=4, steps=8, save_every=2, answer_s=lambda s, i: 0.1)).checkpoints[0]
    with pytest.raises(ConservationError, match="step 3 is the last; train at least so many"):
        AsyncTrainingFlow(SimTrainer(max_lag=4, steps=3, resume=before))
    longer = Life(SimTrainer(max_lag=4, steps=12, resume=before))
    assert longer.flow.result().steps == 12


def test_training_continues_while_a_checkpoint_is_written_only_as_far_as_weights_allow() -> None:
    trainer = SimTrainer(
        max_lag=2,
        save_every=2,
        costs={"save": 30.0},
        roles=WITH_CRITIC,
        places={"critic": "critic", "logp": "logp"},
        old="rollout",
    )
    Life(trainer)
    calls = trainer.calls
    assert calls.index("gather:2") < calls.index("save:2"), "replicas do not wait for it"
    for role in ("update", "critic"):
        assert calls.index("save:2") < calls.index(f"{role}:3")
