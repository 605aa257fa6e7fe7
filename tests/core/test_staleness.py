# SPDX-License-Identifier: Apache-2.0
"""Versions only grow and keep their order; admission bounds the lag of every token."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.core.channel import Channel
from recipe.async_pipeline.core.clock import run_virtual
from recipe.async_pipeline.core.staleness import BatchAdmission, Kind, Versions, check_lag, lag
from recipe.async_pipeline.errors import ChannelClosed, StageProtocolError, StalenessViolation


def publish(versions: Versions, version: int) -> None:
    """Train, gather and serve a version at once."""
    versions.advance_trained(version)
    versions.advance_gathered(version)
    versions.advance_served(version)


async def settle() -> None:
    """Let everything run that can."""
    await asyncio.sleep(1)


# Lag.


@pytest.mark.parametrize(("trainer", "first", "expected"), [(0, 0, 0), (5, 5, 0), (5, 4, 1), (9, 2, 7)])
def test_lag_is_the_distance_to_the_trainer(trainer: int, first: int, expected: int) -> None:
    assert lag(trainer, first) == expected


@pytest.mark.parametrize("max_lag", range(4))
@pytest.mark.parametrize("step", range(1, 7))
@pytest.mark.parametrize("first_version", range(7))
def test_a_sample_passes_if_its_lag_is_between_zero_and_the_bound(
    step: int, first_version: int, max_lag: int
) -> None:
    found = step - 1 - first_version
    if 0 <= found <= max_lag:
        assert check_lag(step, first_version, max_lag, "trajectory a") == found
    else:
        with pytest.raises(StalenessViolation, match="trajectory a"):
            check_lag(step, first_version, max_lag, "trajectory a")


def test_a_violation_names_step_trajectory_lag_and_bound() -> None:
    with pytest.raises(StalenessViolation) as caught:
        check_lag(9, 5, 2, "trajectory u7:3")
    assert str(caught.value) == "step 9 got trajectory u7:3 of version 5: lag 3 exceeds max_lag 2"
    with pytest.raises(StalenessViolation, match="step 9 starts at version 8, but .* claims version 9"):
        check_lag(9, 9, 2, "trajectory u7:3")


# Versions.


def test_before_the_first_publication_nothing_is_gathered_or_served() -> None:
    versions = Versions()
    assert (versions.trained, versions.gathered, versions.served) == (0, -1, -1)


KIND = st.sampled_from(["trained", "gathered", "served"])


@given(st.lists(st.tuples(KIND, st.integers(-1, 6)), max_size=30))
def test_versions_only_grow_and_keep_their_order(moves: list[tuple[Kind, int]]) -> None:
    versions = Versions()
    model = {"trained": 0, "gathered": -1, "served": -1}
    ceiling = {"gathered": "trained", "served": "gathered"}
    for kind, version in moves:
        legal = version >= model[kind] and (kind == "trained" or version <= model[ceiling[kind]])
        advance = getattr(versions, f"advance_{kind}")
        if legal:
            advance(version)
            model[kind] = version
        else:
            with pytest.raises(StalenessViolation, match=str(version)):
                advance(version)
        assert {kind: getattr(versions, kind) for kind in model} == model
        assert versions.served <= versions.gathered <= versions.trained


def test_a_violation_of_the_order_says_what_is_missing() -> None:
    versions = Versions()
    with pytest.raises(StalenessViolation, match="version 1 cannot be gathered: only 0 is trained"):
        versions.advance_gathered(1)
    with pytest.raises(StalenessViolation, match="version 0 cannot be served: only -1 is gathered"):
        versions.advance_served(0)
    publish(versions, 3)
    with pytest.raises(StalenessViolation, match="served version cannot go back from 3 to 2"):
        versions.advance_served(2)


def test_wait_for_returns_at_once_if_the_version_is_reached() -> None:
    with pytest.raises(StopIteration):
        Versions().wait_for("trained", 0).send(None)


@given(
    wanted=st.lists(st.tuples(KIND, st.integers(0, 6)), max_size=12),
    steps=st.lists(st.integers(1, 3), max_size=6),
    cancelled=st.sets(st.integers(0, 11)),
)
def test_exactly_those_wake_whose_version_is_reached(
    wanted: list[tuple[Kind, int]], steps: list[int], cancelled: set[int]
) -> None:
    async def main() -> None:
        versions = Versions()
        tasks = [asyncio.create_task(versions.wait_for(kind, version)) for kind, version in wanted]
        await settle()
        for number in cancelled & set(range(len(tasks))):
            tasks[number].cancel()
        await settle()
        version = -1
        for kind, step in zip(["gathered", "served", "trained"] * 2, steps, strict=False):
            if kind == "trained":
                version = versions.trained + step
                versions.advance_trained(version)
            elif kind == "gathered":
                versions.advance_gathered(versions.trained)
            else:
                versions.advance_served(versions.gathered)
            await settle()
            for number, (task, (waited, wants)) in enumerate(zip(tasks, wanted, strict=True)):
                reached = getattr(versions, waited) >= wants
                assert task.done() == (reached or task.cancelled())
                assert task.cancelled() <= (number in cancelled)

    run_virtual(main())


# Admission.


@pytest.mark.parametrize(("max_lag", "first_step"), [(-1, 1), (0, 0)])
def test_admission_rejects_impossible_bounds(max_lag: int, first_step: int) -> None:
    with pytest.raises(ValueError, match="must be >="):
        BatchAdmission(Versions(), max_lag, first_step)


@pytest.mark.parametrize("max_lag", range(4))
def test_the_steps_admitted_are_those_within_the_bound(max_lag: int) -> None:
    versions = Versions()
    admission = BatchAdmission(versions, max_lag)
    assert not any(admission.admits(step) for step in range(1, 10)), "no weights are served yet"
    for served in range(5):
        publish(versions, served)
        admitted = [step for step in range(1, 20) if admission.admits(step)]
        assert admitted == list(range(1, served + max_lag + 2))


def test_steps_come_in_order_each_when_it_is_admitted() -> None:
    async def main() -> list[tuple[int, float]]:
        versions = Versions()
        admission = BatchAdmission(versions, max_lag=1, first_step=1, last_step=4)
        admitted: list[tuple[int, float]] = []

        async def admit() -> None:
            for _ in range(4):
                step = await admission.next_step()
                admitted.append((step, asyncio.get_running_loop().time()))
            with pytest.raises(ChannelClosed, match="step 4 was the last"):
                await admission.next_step()

        task = asyncio.create_task(admit())
        for version in range(3):
            await asyncio.sleep(10)
            publish(versions, version)
        await task
        return admitted

    assert run_virtual(main()) == [(1, 10), (2, 10), (3, 20), (4, 30)]


def test_admission_can_start_in_the_middle_and_go_on_for_ever() -> None:
    async def main() -> list[int]:
        versions = Versions()
        publish(versions, 10)
        admission = BatchAdmission(versions, max_lag=2, first_step=11)
        return [await admission.next_step() for _ in range(3)]

    assert run_virtual(main()) == [11, 12, 13]


def test_only_one_may_wait_and_a_cancelled_wait_skips_no_step() -> None:
    async def main() -> int:
        versions = Versions()
        admission = BatchAdmission(versions, max_lag=0)
        first = asyncio.create_task(admission.next_step())
        await settle()
        with pytest.raises(StageProtocolError, match="somebody waits for step 1 already"):
            await admission.next_step()
        publish(versions, 0)
        first.cancel()  # it has been woken, but has not run
        await asyncio.wait([first])
        assert first.cancelled()
        return await admission.next_step()

    assert run_virtual(main()) == 1


SECONDS = st.integers(0, 9)


class Run:
    """A trainer, replicas that load at their own pace, and batches whose tokens trickle in.

    Durations come from `draws_s`, in turn; each batch puts one group on every replica.
    """

    def __init__(
        self, admission_lag: int, max_lag: int, replicas: int, steps: int, draws_s: list[int]
    ) -> None:
        self.versions = Versions()
        self.admission = BatchAdmission(self.versions, admission_lag, last_step=steps)
        self.max_lag = max_lag
        self.serving = [-1] * replicas
        self.batches = Channel[list[asyncio.Task[int]]]("batches", steps)
        self.lags: list[int] = []
        self.background: list[asyncio.Task[None]] = []
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

    async def group(self, replica: int, tokens_s: list[int]) -> int:
        """Version of the oldest token."""
        first = self.serving[replica]
        for token_s in tokens_s:
            await asyncio.sleep(token_s)
            first = min(first, self.serving[replica])
        return first

    async def generate(self) -> None:
        for expected in count(1):
            try:
                step = await self.admission.next_step()
            except ChannelClosed:
                return
            assert step == expected
            batch = [
                asyncio.create_task(self.group(replica, [self.next_s(), self.next_s()]))
                for replica in range(len(self.serving))
            ]
            await self.batches.send(batch)

    async def train(self, steps: int) -> None:
        self.publish(0)
        for step in range(1, steps + 1):
            for group in await self.batches.receive():
                self.lags.append(check_lag(step, await group, self.max_lag, f"a group of batch {step}"))
            await asyncio.sleep(self.next_s())
            self.versions.advance_trained(step)
            self.publish(step)

    async def run(self, steps: int) -> list[int]:
        await asyncio.gather(self.generate(), self.train(steps))
        await asyncio.gather(*self.background)
        assert self.versions.served == steps
        return self.lags


@given(
    max_lag=st.integers(0, 3), replicas=st.integers(1, 3), draws_s=st.lists(SECONDS, min_size=1, max_size=40)
)
def test_no_token_is_older_than_the_bound_whatever_straggles(
    max_lag: int, replicas: int, draws_s: list[int]
) -> None:
    lags = run_virtual(Run(max_lag, max_lag, replicas, 8, draws_s).run(8))
    assert len(lags) == 8 * replicas
    assert all(0 <= found <= max_lag for found in lags)


@pytest.mark.parametrize("max_lag", range(4))
def test_the_bound_is_used_to_the_full(max_lag: int) -> None:
    lags = run_virtual(Run(max_lag, max_lag, 1, 8, [1]).run(8))
    assert max(lags) == max_lag


@pytest.mark.parametrize("max_lag", range(3))
def test_admission_one_step_too_early_would_be_caught(max_lag: int) -> None:
    with pytest.raises(StalenessViolation, match=f"lag {max_lag + 1} exceeds max_lag {max_lag}"):
        run_virtual(Run(max_lag + 1, max_lag, 1, 8, [1]).run(8))
