# SPDX-License-Identifier: Apache-2.0
"""The message queue on its own: who is admitted, who is taken, who is recalled."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.core.groups import message_queue
from recipe.async_pipeline.core.groups.items import Group, Prompt, Trajectory, plain
from recipe.async_pipeline.core.groups.message_queue import MessageQueue, share_of
from recipe.async_pipeline.core.groups.recall import Recall
from recipe.async_pipeline.core.groups.untrained_groups import UntrainedGroups
from recipe.async_pipeline.core.lag.staleness import Versions, check_lag
from recipe.async_pipeline.core.lag.token_ages import masked, oldest_in
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import (
    ChannelClosed,
    ConservationError,
    StageProtocolError,
    StalenessViolation,
)

pytestmark = pytest.mark.virtual_time


class Bench:
    """A queue, and what happens around it, one call a step."""

    def __init__(self, **settings: Any) -> None:
        self.versions = Versions()
        self.queue = MessageQueue(self.versions, **({"batch": 2, "max_lag": 1, "last_step": 4} | settings))
        self.recalled: list[str] = []
        self.recalls: dict[str, Recall] = {}
        self._drawn = 0

    def serve(self, version: int) -> None:
        self.versions.advance_trained(version)
        self.versions.advance_gathered(version)
        self.versions.advance_served(version)

    def admit(self) -> list[str]:
        """Draw all that may be drawn now. Returns the new uids."""
        new: list[str] = []
        while self.queue.room():
            admission = run_virtual(self.queue.next_admission())
            for _ in range(admission.prompts):
                uid = chr(ord("a") + self._drawn)
                self._drawn += 1
                self.queue.enter(Prompt(uid=uid, step=admission.step), admission.version)
                self.watch(uid)
                new.append(uid)
        return new

    def watch(self, uid: str) -> None:
        self.recalls[uid] = self.queue.watch(uid)
        self.recalls[uid].subscribe(partial(self.recalled.append, uid))

    def verdict(self, uid: str) -> str | None:
        return self.recalls[uid].verdict if uid in self.recalls else None

    def finish(self, *uids: str, version: int | None = None) -> None:
        for uid in uids:
            one = group(uid, self.versions.served if version is None else version)
            assert self.verdict(uid) is None
            self.queue.arrive(one)
            self.queue.put(one)

    def take(self, step: int) -> str | None:
        taken = self.queue.take(step)
        return None if taken is None else "".join(g.uid for g in taken)


def group(uid: str, version: int = 0) -> Group:
    return Group(
        uid=uid,
        step=1,
        trajectories=(Trajectory(key=uid, first_version=version, last_version=version, num_tokens=1),),
    )


def group_of(uid: str, versions: Sequence[int]) -> Group:
    """Return a group of one response, of which each token was written by the version given for it."""
    changes = [i for i, version in enumerate(versions) if i == 0 or versions[i - 1] != version]
    one = Trajectory(
        key=uid,
        first_version=min(versions),
        last_version=max(versions),
        num_tokens=len(versions),
        spans=plain((versions[i], i) for i in changes),
    )
    return Group(uid=uid, step=1, trajectories=(one,))


def oldest(one: Group) -> int:
    found = oldest_in(one.trajectories)
    assert found is not None, "every group has a token that is trained"
    return found


# Admission.


@pytest.mark.parametrize("max_lag", range(4))
def test_admits_a_batch_for_each_version_of_the_bound_and_one_more(max_lag: int) -> None:
    bench = Bench(max_lag=max_lag, last_step=100)
    assert bench.queue.room() == 0, "no weights are served yet"
    for served in range(5):
        bench.serve(served)
        bench.admit()
        assert bench.queue.untrained == 2 * (served + max_lag + 1)


def test_what_is_in_the_queue_is_bounded_for_every_served_version() -> None:
    bench = Bench(max_lag=1)
    bench.serve(0)
    assert bench.admit() == ["a", "b", "c", "d"]
    bench.finish("a", "b")
    assert bench.take(1) == "ab"
    assert bench.queue.room() == 0, "a step was taken, but nothing newer is served"


def test_a_share_of_a_batch_may_be_one_version_older() -> None:
    bench = Bench(batch=8, max_lag=2, oldest_share=0.25, last_step=9)
    bench.serve(0)
    assert len(bench.admit()) == 8 + 8 + 2
    bench.serve(1)
    assert len(bench.admit()) == 8


def test_the_depth_can_be_changed_while_it_runs() -> None:
    bench = Bench(max_lag=3, last_step=9)
    bench.queue.depth = 1
    bench.serve(0)
    assert len(bench.admit()) == 4
    bench.queue.depth = 3
    assert len(bench.admit()) == 4
    bench.queue.depth = 0
    bench.finish(*"abcd")
    assert (bench.take(1), bench.take(2)) == ("ab", "cd")
    bench.serve(1)
    bench.serve(2)
    assert bench.admit() == [], "four are on their way, and two would do"


def test_admissions_say_for_which_step_and_which_version_is_served() -> None:
    bench = Bench(max_lag=1, first_step=3, last_step=6)
    for version in (2, 3):
        bench.serve(version)
    admissions = [run_virtual(bench.queue.next_admission()) for _ in range(3)]
    assert [(t.step, t.prompts, t.version) for t in admissions] == [(3, 2, 3), (4, 2, 3), (5, 2, 3)]


def test_ends_when_the_last_step_was_taken() -> None:
    bench = Bench(last_step=1)
    bench.serve(0)
    bench.finish(*bench.admit())

    async def main() -> None:
        waiting = asyncio.create_task(bench.queue.next_admission())
        await asyncio.sleep(1)
        assert not waiting.done(), "a group may yet be given up"
        with pytest.raises(StageProtocolError, match="another task waits"):
            await bench.queue.next_admission()
        assert bench.take(1) == "ab"
        with pytest.raises(ChannelClosed, match="step 1 was the last"):
            await waiting

    run_virtual(main())


async def test_waits_for_a_version_to_be_served() -> None:
    bench = Bench(max_lag=0)

    waiting = asyncio.create_task(bench.queue.next_admission())
    await asyncio.sleep(1)
    assert not waiting.done()
    bench.serve(0)
    assert (await waiting).prompts == 2


@pytest.mark.parametrize(
    ("share", "batch", "groups"),
    [(1.0, 16, 16), (0.25, 16, 4), (0.29, 100, 29), (0.1, 16, 1), (0.05, 16, 0), (0.57, 100, 57)],
)
def test_a_share_of_a_batch_is_whole_groups(share: float, batch: int, groups: int) -> None:
    """0.29 x 100 is 28.999999999999996 in floats."""
    assert share_of(share, batch) == groups


@pytest.mark.parametrize(
    "settings",
    [
        {"max_lag": -1},
        {"batch": 0},
        {"first_step": 0},
        {"oldest_share": 0},
        {"oldest_share": 1.5},
        {"max_lag": 0, "oldest_share": 0.5},
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Bench(**settings)


# Which groups a step takes.


def test_in_the_order_of_the_draws_a_step_waits_for_its_own() -> None:
    bench = Bench(max_lag=1)
    bench.serve(0)
    bench.admit()
    bench.finish("c", "d", "b")
    assert bench.take(1) is None
    bench.finish("a")
    assert bench.take(1) == "ab"
    assert bench.take(2) == "cd"


def test_in_the_order_of_completion_a_step_takes_what_is_there() -> None:
    bench = Bench(max_lag=1, order="finished")
    bench.serve(0)
    bench.admit()
    bench.finish("d", "b")
    assert bench.take(1) == "bd"


def test_a_step_waits_rather_than_leave_behind_what_would_get_too_old() -> None:
    bench = Bench(max_lag=1, order="finished")
    bench.serve(0)
    assert bench.admit() == list("abcd")
    bench.finish("b", "d")
    assert bench.take(1) == "bd"
    bench.serve(1)
    assert bench.admit() == list("ef")
    bench.finish("e", "f", "c")
    assert bench.take(2) is None, "a is of version 0 and would be of lag 2 in step 3"
    bench.finish("a", version=0)
    assert bench.take(2) == "ac"
    assert bench.recalled == []


def test_tokens_that_are_younger_than_the_admission_may_stay_longer() -> None:
    bench = Bench(max_lag=1, order="finished")
    bench.serve(0)
    bench.admit()
    bench.finish("a", "b")
    assert bench.take(1) == "ab"
    bench.serve(1)
    bench.admit()
    bench.finish("c", version=1)
    bench.finish("e", "f")
    assert bench.take(2) is None, "d is still out"
    bench.finish("d", version=1)
    assert bench.take(2) == "cd"


@pytest.mark.parametrize(("step", "last_step"), [(2, 4), (0, 4), (1, 0)])
def test_steps_are_taken_in_order(step: int, last_step: int) -> None:
    with pytest.raises(ConservationError, match=f"step {step} cannot take groups"):
        Bench(last_step=last_step).queue.take(step)


@pytest.mark.parametrize("again", [False, True])
def test_a_group_that_is_not_awaited_is_caught(again: bool) -> None:
    bench = Bench()
    bench.serve(0)
    bench.admit()
    if again:
        bench.finish("a")
    with pytest.raises(
        ConservationError, match="group . arrived at the message queue, which does not expect it"
    ):
        bench.queue.put(group("a" if again else "z", 0))


def test_a_group_that_is_older_than_its_admission_is_caught() -> None:
    bench = Bench(max_lag=0)
    bench.serve(0)
    bench.finish(*bench.admit())
    assert bench.take(1) == "ab"
    bench.serve(1)
    bench.finish(*bench.admit(), version=0)
    with pytest.raises(StalenessViolation, match="step 2 got groups of lag 1"):
        bench.take(2)


# Groups that hold a step up.


def settle_step_2(straggler: str, order: str) -> Bench:
    """Step 2 has what it needs, but `a`, which was drawn for step 1, is still out."""
    bench = Bench(max_lag=1, order=order, straggler=straggler)
    bench.serve(0)
    bench.admit()
    if order == "finished":
        bench.finish("b", "c")
        assert bench.take(1) == "bc"
        bench.serve(1)
        bench.admit()
        bench.finish("d", "e", "f")
    else:
        bench.finish("b", "c", "d")
    return bench


@pytest.mark.parametrize(("order", "step", "taken"), [("drawn", 1, "bc"), ("finished", 2, "de")])
def test_dropped_it_gives_its_place_to_another(order: str, step: int, taken: str) -> None:
    bench = settle_step_2("drop", order)
    room = bench.queue.room()
    assert bench.take(step) == taken
    assert bench.recalled == ["a"]
    assert bench.verdict("a") == "drop"
    bench.serve(step)
    assert bench.queue.room() > room
    with pytest.raises(ConservationError, match="does not expect it"):
        bench.queue.put(group("a", 0))


@pytest.mark.parametrize(("order", "step", "taken"), [("drawn", 1, "bc"), ("finished", 2, "de")])
def test_answered_again_it_goes_to_the_end(order: str, step: int, taken: str) -> None:
    bench = settle_step_2("regenerate", order)
    before = bench.queue.untrained
    assert bench.take(step) == taken
    assert bench.recalled == ["a"]
    assert bench.verdict("a") == "regenerate"
    assert bench.queue.untrained == before - 2
    bench.watch("a")
    bench.serve(step)
    bench.finish("a")
    bench.finish(*[uid for uid in bench.admit()])
    assert "a" in (bench.take(step + 1) or "") + (bench.take(step + 2) or "")


def test_one_that_has_arrived_is_waited_for() -> None:
    bench = settle_step_2("drop", "drawn")
    bench.queue.arrive(group("a"))
    assert bench.take(1) is None, "it is on its way here"
    bench.queue.put(group("a", 0))
    assert bench.take(1) == "ab"


def test_one_whose_generation_has_not_begun_is_waited_for() -> None:
    bench = Bench(max_lag=1, straggler="drop")
    bench.serve(0)
    for _ in range(2):
        admission = run_virtual(bench.queue.next_admission())
        for uid in ("a", "b") if admission.step == 1 else ("c", "d"):
            bench.queue.enter(Prompt(uid=uid, step=admission.step), admission.version)
    bench.finish("b", "c")
    assert bench.take(1) is None


@pytest.mark.parametrize("straggler", ["wait", "regenerate", "drop"])
def test_a_group_due_before_the_step_is_recalled_with_a_share_of_the_oldest(straggler: str) -> None:
    """`a` is the one group that may have the full lag in step 2, and no later step may take it."""
    bench = Bench(max_lag=1, order="finished", straggler=straggler, oldest_share=0.5)
    bench.serve(0)
    assert bench.admit() == list("abc")
    bench.finish("b", "c")
    assert bench.take(1) == "bc"
    bench.serve(1)
    assert bench.admit() == list("de")
    bench.finish("d", "e")
    assert bench.take(2) == (None if straggler == "wait" else "de")
    assert bench.verdict("a") == (None if straggler == "wait" else straggler)


def test_no_more_are_given_up_than_need_be() -> None:
    bench = Bench(batch=4, max_lag=1, order="finished", straggler="drop", last_step=9)
    bench.serve(0)
    assert bench.admit() == list("abcdefgh")
    bench.finish(*"efgh")
    assert bench.take(1) == "efgh"
    bench.serve(1)
    assert bench.admit() == list("ijkl")
    bench.finish(*"ijkl")
    assert bench.take(2) == "ijkl"
    assert sorted(bench.recalled) == list("abcd"), "step 2 was the last for each of them"


def test_filtered_it_gives_its_place_to_another() -> None:
    bench = Bench(max_lag=0)
    bench.serve(0)
    assert bench.admit() == ["a", "b"]
    bench.queue.arrive(group("a"))
    bench.queue.give_back("a")
    assert bench.admit() == ["c"]
    bench.finish("c", "b")
    assert bench.take(1) == "bc"


def test_counts_what_is_inside() -> None:
    bench = Bench(max_lag=1)
    bench.serve(0)
    bench.admit()
    bench.finish("a", "d")
    counts: Sequence[int] = (bench.queue.untrained, bench.queue.finished)
    assert counts == (4, 2)


# Replicas that load at their own pace, and tokens that trickle in.

SECONDS = st.integers(0, 9)


class Run:
    """Durations come from `draws_s`, in turn; groups go to the replicas in turn."""

    def __init__(
        self, admission_lag: int, max_lag: int, replicas: int, steps: int, draws_s: list[int], **settings: Any
    ) -> None:
        self.versions = Versions()
        self.queue = MessageQueue(self.versions, batch=2, max_lag=admission_lag, last_step=steps, **settings)
        self.max_lag = max_lag
        self.serving = [-1] * replicas
        self.lags: list[list[int]] = []
        self.tokens_each = 2
        self.slow: Mapping[str, int] = {}
        """Seconds of each token of some groups."""
        self.expired: list[str] = []
        self.trained: list[tuple[int, Group]] = []
        self.background: list[asyncio.Task[None]] = []
        self.changed = asyncio.Event()
        self._draws_s = draws_s
        self._drawn = count()

    def next_s(self) -> int:
        return self._draws_s[next(self._drawn) % len(self._draws_s)]

    async def load(self, replica: int, version: int, load_s: int) -> None:
        await asyncio.sleep(load_s)
        self.serving[replica] = max(self.serving[replica], version)  # a replica never goes back
        self.versions.advance_served(min(self.serving))

    def publish(self, version: int) -> None:
        self.versions.advance_gathered(version)
        for replica in range(len(self.serving)):
            self.background.append(asyncio.create_task(self.load(replica, version, self.next_s())))

    async def group(self, uid: str, replica: int) -> None:
        while True:
            recall = self.queue.watch(uid)
            versions = await recall.bound(self.tokens(uid, replica))
            if recall.verdict is None:
                assert versions is not None
                made = group_of(uid, versions)
                self.queue.arrive(made)
                if self.queue.is_too_old(made):
                    self.expired.append(uid)
                    self.queue.give_back(uid)
                else:
                    self.queue.put(made)
                self.changed.set()
            if recall.verdict != "regenerate":
                return

    async def tokens(self, uid: str, replica: int) -> list[int]:
        """Return the version of each token."""
        versions = [self.serving[replica]]
        for _ in range(self.tokens_each):
            await asyncio.sleep(self.slow.get(uid) or self.next_s())
            versions.append(self.serving[replica])
        return versions

    async def generate(self) -> None:
        numbers = count()
        while True:
            try:
                admission = await self.queue.next_admission()
            except ChannelClosed:
                return
            for _ in range(admission.prompts):
                number = next(numbers)
                self.queue.enter(Prompt(uid=f"{number}", step=admission.step), admission.version)
                replica = number % len(self.serving)
                self.background.append(asyncio.create_task(self.group(f"{number}", replica)))

    async def train(self, steps: int) -> None:
        self.publish(0)
        for step in range(1, steps + 1):
            while not (groups := self.queue.take(step)):
                self.changed.clear()
                await asyncio.wait_for(self.changed.wait(), 1000)
            self.trained += [(step, one) for one in groups]
            self.lags.append([check_lag(step, oldest(g), self.max_lag, g.uid) for g in groups])
            await asyncio.sleep(self.next_s())
            self.versions.advance_trained(step)
            self.publish(step)

    async def run(self, steps: int) -> list[list[int]]:
        await asyncio.gather(self.generate(), self.train(steps))
        await asyncio.gather(*self.background)
        assert self.queue.untrained == 0
        return self.lags


@given(
    max_lag=st.integers(0, 3),
    replicas=st.integers(1, 3),
    draws_s=st.lists(SECONDS, min_size=1, max_size=40),
    order=st.sampled_from(["drawn", "finished"]),
    straggler=st.sampled_from(["wait", "regenerate", "drop", "mask"]),
    half=st.booleans(),
)
def test_no_token_is_older_than_the_bound_whatever_straggles(
    max_lag: int, replicas: int, draws_s: list[int], order: str, straggler: str, half: bool
) -> None:
    share = 0.5 if half and max_lag and straggler != "mask" else 1.0
    lags = run_virtual(
        Run(max_lag, max_lag, replicas, 8, draws_s, order=order, straggler=straggler, oldest_share=share).run(
            8
        )
    )
    assert [len(step) for step in lags] == [2] * 8
    assert all(0 <= lag <= max_lag for step in lags for lag in step)
    assert all(step.count(max_lag) <= 2 * share for step in lags)


@given(
    max_lag=st.integers(0, 3),
    replicas=st.integers(1, 3),
    draws_s=st.lists(SECONDS, min_size=1, max_size=40),
    order=st.sampled_from(["drawn", "finished"]),
    tokens_each=st.integers(1, 12),
)
def test_masked_every_token_that_is_trained_is_within_the_bound(
    max_lag: int, replicas: int, draws_s: list[int], order: str, tokens_each: int
) -> None:
    """Responses may take longer than the lag allows; exactly the tokens that are too old are masked."""
    run = Run(max_lag, max_lag, replicas, 8, draws_s, order=order, straggler="mask")
    run.tokens_each = tokens_each
    run_virtual(run.run(8))
    uids = [one.uid for _, one in run.trained]
    assert len(uids) == len(set(uids)) == 16
    assert not set(uids) & set(run.expired)
    for step, one in run.trained:
        (answer,) = one.trajectories
        assert answer.spans is not None
        left_out = {place for start, end in masked(answer) for place in range(start, end)}
        version_of = dict.fromkeys(range(answer.num_tokens), 0)
        for version, start in answer.spans:
            version_of.update(dict.fromkeys(range(start, answer.num_tokens), version))
        too_old = {place for place, version in version_of.items() if step - 1 - version > max_lag}
        assert left_out == too_old
        assert len(left_out) < answer.num_tokens


@pytest.mark.parametrize("order", ["drawn", "finished"])
def test_the_tokens_of_stragglers_are_masked_and_their_prompts_trained(order: str) -> None:
    """The first prompt takes as long as eight optimizer steps, and no step waits for it."""
    run = Run(2, 2, 1, 12, [1], order=order, straggler="mask")
    run.slow = {"0": 8}
    run_virtual(run.run(12))
    (step, late), *_ = [(step, one) for step, one in run.trained if one.uid == "0"]
    assert step > 4, "it could be in no step after the third without a mask"
    assert masked(late.trajectories[0]) and oldest(late) >= step - 1 - 2
    assert run.expired == [] and len(run.trained) == 24


@pytest.mark.parametrize("order", ["drawn", "finished"])
def test_a_postponed_group_that_wrote_nothing_since_is_given_up(order: str) -> None:
    bench = settle_step_2("mask", order)
    step, taken = (1, "bc") if order == "drawn" else (2, "de")
    if order == "finished":
        bench.serve(2)
    assert bench.take(step) == taken
    assert bench.verdict("a") is None, "it is generated further"
    late, longer = group_of("a", [0, 0]), group_of("a", [0, bench.versions.served])
    bench.queue.arrive(late)
    assert bench.queue.is_too_old(late) == (bench.versions.served > 0)
    assert not bench.queue.is_too_old(longer)


def test_masks_do_not_go_with_a_share_of_the_oldest() -> None:
    with pytest.raises(ValueError, match="oldest_share must be 1 where the straggler policy is mask"):
        Bench(straggler="mask", oldest_share=0.5)


@pytest.mark.parametrize("max_lag", range(4))
@pytest.mark.parametrize("order", ["drawn", "finished"])
def test_the_bound_is_used_to_the_full(max_lag: int, order: str) -> None:
    lags = run_virtual(Run(max_lag, max_lag, 1, 8, [1], order=order).run(8))
    assert max(map(max, lags)) == max_lag


@pytest.mark.parametrize("max_lag", range(3))
def test_admission_one_step_too_early_would_be_caught(max_lag: int) -> None:
    with pytest.raises(StalenessViolation, match=f"lag {max_lag + 1} exceeds max_lag {max_lag}"):
        run_virtual(Run(max_lag + 1, max_lag, 1, 8, [1]).run(8))


# Checkpoints.


def test_a_queue_continues_from_its_state() -> None:
    """Taken, finished, answered, in flight; unused admissions are requested again."""
    before = Bench(max_lag=2, last_step=9, order="finished")
    before.serve(0)
    before.admit()
    before.finish(*"abcde")
    assert before.take(1) == "ab"
    before.queue.trained(1)
    before.serve(1)
    admission = run_virtual(before.queue.next_admission())
    assert admission.prompts == 2
    before.queue.enter(Prompt(uid="g", step=admission.step), admission.version)
    assert before.take(2) == "cd"
    before.queue.arrive(group("f"))
    state = before.queue.state()
    assert {e.uid: (e.number, e.due, e.group is not None, e.answer is not None) for e in state.entries} == {
        "e": (4, 2, True, False),
        "f": (5, 2, False, True),
        "g": (6, 3, False, False),
    }

    after = Bench(max_lag=2, first_step=2, last_step=9, order="finished")
    after.queue.restore(state)
    assert after.queue.state() == state
    assert (after.queue.next_step, after.queue.live) == (3, set("cdefg"))
    assert after.queue.room() == 0, "nothing is served yet"
    after.serve(1)
    assert after.queue.room() == 1, "as many as had leave and were not drawn"
    after.queue.put(group("f"))
    assert after.take(3) == "ef"


def test_a_queue_of_a_shorter_run_does_not_take_what_it_cannot_train() -> None:
    before = Bench(max_lag=2, last_step=9)
    before.serve(0)
    before.admit()
    state = before.queue.state()
    with pytest.raises(
        ConservationError, match="holds 6 groups for the steps up to 3, but step 2 is the last"
    ):
        Bench(max_lag=2, last_step=2).queue.restore(state)
    Bench(max_lag=2, last_step=3).queue.restore(state)


class Plain(UntrainedGroups):
    """Looks at all groups, one after the other, whenever a step is requested."""

    def in_the_way(self, step: int, renewed_due: int) -> list[str] | None:
        finished = [(uid, entry) for uid, entry in self.entries.items() if entry.group is not None]
        if self._order == "drawn":
            finished.sort(key=lambda pair: pair[1].number)
        else:
            finished.sort(key=lambda pair: (pair[1].due, pair[1].number))
        if len(finished) < self._batch:
            return None
        left = {uid: e for uid, e in self.entries.items() if uid not in dict(finished[: self._batch])}
        waits = self._straggler == "wait"
        if self._order == "drawn":
            last = finished[self._batch - 1][1].number
            before = [(e.number, uid, e) for uid, e in left.items() if e.group is None and e.number < last]
            recallable = all(e.recall for _, _, e in before) and not (before and waits)
            return [uid for _, uid, _ in sorted(before)] if recallable else None

        drawn_dues = Counter(e.due for e in self.entries.values())
        promised = (self._dues - drawn_dues).elements()
        dues = sorted([*(e.due for e in left.values()), *promised])
        in_flight = deque(sorted((e.due, uid) for uid, e in left.items() if e.recall))
        recalled: list[str] = []
        while (due := self._first_excess(step, dues)) is not None:
            too_late = self._straggler in ("regenerate", "mask") and renewed_due <= due
            if waits or too_late or not in_flight or in_flight[0][0] > due:
                return None
            was_due, uid = in_flight.popleft()
            recalled.append(uid)
            dues.remove(was_due)
            if self._straggler in ("regenerate", "mask"):
                dues = sorted([*dues, renewed_due])
        return recalled

    def _first_excess(self, step: int, dues: Sequence[int]) -> int | None:
        counted = enumerate(dues, start=1)
        return next((due for n, due in counted if n > self._batch * (due - step) + self._oldest), None)


@given(
    st.integers(0, 3),
    st.sampled_from(["drawn", "finished"]),
    st.sampled_from(["wait", "regenerate", "drop", "mask"]),
    st.sampled_from([0.5, 1.0]),
    st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.booleans()), max_size=120),
)
def test_keeping_groups_in_order_changes_nothing(
    max_lag: int, order: str, straggler: str, share: float, choices: list[tuple[int, bool, bool]]
) -> None:
    """Groups finish, are filtered and are served in any order; both queues say the same all along."""
    settings = {
        **{"max_lag": max_lag, "last_step": 8, "order": order, "straggler": straggler},
        "oldest_share": share if max_lag and straggler != "mask" else 1.0,
    }
    with mock.patch.object(message_queue, "UntrainedGroups", Plain):
        plain = Bench(**settings)
    benches = [Bench(**settings), plain]
    told: list[list[Any]] = [[], []]
    for bench, said in zip(benches, told, strict=True):
        bench.serve(0)
        open_, step = bench.admit(), 1
        for choice, filtered, serves in choices:
            if open_:
                uid = open_.pop(choice % len(open_))
                verdict = bench.verdict(uid)
                if verdict is None:
                    bench.queue.arrive(group(uid))
                if verdict == "regenerate":
                    bench.watch(uid)
                    open_.append(uid)
                elif verdict is None and filtered and choice % 5 == 0:
                    bench.queue.give_back(uid)
                elif verdict is None:
                    bench.queue.put(group(uid, bench.versions.served))
            taken = bench.take(step) if step <= 8 else None
            said.append(taken)
            step += taken is not None
            if serves and bench.versions.served < step - 1:
                bench.serve(step - 1)
            open_ += bench.admit()
    assert told[0] == told[1]
    assert benches[0].recalled == benches[1].recalled
