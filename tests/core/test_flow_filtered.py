# SPDX-License-Identifier: Apache-2.0
"""A run in which most groups are filtered, against the earliest that its admission allows."""

from __future__ import annotations

import heapq
import random

import pytest

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.core.groups.untrained_groups import Order
from recipe.async_pipeline.core.waits.clock import run_virtual
from tests.fakes.trainer import ALL_ROLES, SimTrainer

GROUPS, STEPS = 64, 12
COSTS = {"logp": 0.25, "update": 1.0, "gather": 0.125, "publish": 0.125}
TRAIN_S = COSTS["logp"] + COSTS["update"]


class Workload:
    """Groups in the order of their draws: seconds with a heavy tail, and whether they are filtered."""

    def __init__(self, filtered: float, seed: int = 1) -> None:
        chance = random.Random(seed)
        count = int(GROUPS * STEPS / (1 - filtered) * 1.5)
        self.groups = [
            (min(60.0, chance.lognormvariate(1.0, 1.2)), chance.random() < filtered) for _ in range(count)
        ]


def trained(work: Workload, max_lag: int, order: Order) -> float:
    """Return when the last step of the flow ended."""

    def number(step: int, index: int) -> int:
        return (step - 1) * GROUPS + index

    trainer = SimTrainer(
        max_lag=max_lag,
        steps=STEPS,
        groups=GROUPS,
        n=1,
        costs=COSTS,
        order=order,
        answer_s=lambda step, index: work.groups[number(step, index)][0],
        filtered=lambda uid: work.groups[number(*map(int, uid[1:].split(".")))][1],
        roles=[role for role in ALL_ROLES if role != "ref_logp"],
    )
    trainer.wait_timeout_s = None
    flow = AsyncTrainingFlow(trainer)
    run_virtual(flow.run())
    return max(record.t for record in flow.log.records if record.event == "TRAINED")


def earliest(work: Workload, max_lag: int, order: Order) -> float:
    """Return when the last step could end if each admitted group began at once.

    A place is free as soon as its group is filtered or a version is served. A step takes the next groups in
    the order of the draws, or finished ones if all others still fit into the steps until they are due.
    Nothing but training and publishing takes time.
    """
    groups = iter(enumerate(work.groups))
    in_flight: list[tuple[float, int, bool]] = []
    finished: set[int] = set()
    unfinished: set[int] = set()
    due: dict[int, int] = {}
    admitted = step = version = 0
    served, now = COSTS["gather"] + COSTS["publish"], 0.0
    ends = [0.0]

    def admit(count: int) -> None:
        nonlocal admitted
        admitted += count
        for _ in range(count):
            number, (seconds, is_filtered) = next(groups)
            unfinished.add(number)
            due[number] = version + max_lag
            heapq.heappush(in_flight, (now + seconds, number, is_filtered))

    def ready() -> list[int]:
        chosen = sorted(finished, key=lambda n: n if order == "drawn" else (due[n], n))[:GROUPS]
        if len(chosen) < GROUPS:
            return []
        if order == "drawn":
            return [] if unfinished and min(unfinished) < chosen[-1] else chosen
        dues = sorted(due[n] for n in (finished | unfinished) - set(chosen))
        fits = all(count <= GROUPS * (by - step) for count, by in enumerate(dues, start=1))
        return chosen if fits else []

    versions = [served]
    while step < STEPS:
        # The next thing that happens: a version is served, or a group finishes.
        if versions and (not in_flight or versions[0] <= in_flight[0][0]):
            now = versions.pop(0)
            version = len(ends) - 1 - len(versions)
            admit(min(GROUPS * (version + max_lag + 1), GROUPS * STEPS) - admitted)
        else:
            now, number, is_filtered = heapq.heappop(in_flight)
            unfinished.discard(number)
            if is_filtered:
                admitted -= 1
                admit(1)
            else:
                finished.add(number)
        while step < STEPS and (taken := ready()):
            finished -= set(taken)
            step += 1
            ends.append(max(now, ends[-1]) + TRAIN_S)
            versions.append(ends[-1] + COSTS["gather"] + COSTS["publish"])
    return ends[-1]


@pytest.mark.slow
@pytest.mark.parametrize("filtered", [0.0, 0.3, 0.6])
@pytest.mark.parametrize(("max_lag", "order"), [(0, "drawn"), (1, "drawn"), (3, "finished")])
def test_filtered_groups_do_not_starve_generation(filtered: float, max_lag: int, order: Order) -> None:
    work = Workload(filtered)
    least = earliest(work, max_lag, order)
    assert least <= trained(work, max_lag, order) <= 1.05 * least
