# SPDX-License-Identifier: Apache-2.0
"""The flow against the earliest that any schedule could be: twenty random workloads in virtual time."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.core.waits.clock import run_virtual
from tests.fakes.trainer import ALL_ROLES, SimTrainer

GROUPS, STEPS = 16, 40
MEASURED = slice(8, STEPS - 8)


class Workload:
    """Answers of lognormal length with a cap, and stages that cost what they cost; all drawn from a seed."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        scale, sigma = chance.uniform(0.2, 6.0), chance.uniform(0.2, 1.0)
        ranges = {
            "logp": (0.05, 0.4),
            "update": (0.2, 1.0),
            "advantage": (0.0, 0.1),
            "gather": (0.01, 0.1),
            "publish": (0.01, 0.3),
            "finish": (0.0, 0.1),
        }
        self.costs = {name: chance.uniform(*between) for name, between in ranges.items()}
        self.answers = [
            min(scale * chance.lognormvariate(0, sigma), 8 * scale) for _ in range(GROUPS * STEPS)
        ]


def measured(work: Workload, max_lag: int, depth: int) -> list[float]:
    """When each step ended."""
    answers = iter(work.answers)
    trainer = SimTrainer(
        max_lag=max_lag,
        steps=STEPS,
        groups=GROUPS,
        n=1,
        costs=work.costs,
        answer_s=lambda step, index: next(answers),
        roles=[role for role in ALL_ROLES if role != "ref_logp"],
        order="finished",
    )
    flow = AsyncTrainingFlow(trainer)
    flow.queue.depth = depth
    run_virtual(flow.run())
    return [record.t for record in flow.log.records if record.event == "TRAINED"]


def earliest(work: Workload, max_lag: int, depth: int) -> list[float]:
    """No schedule with the same leave to draw can end step s earlier.

    By then 16 s groups are finished, among them all that are due; and the training devices did the work of
    each step.
    """
    costs = work.costs
    serve = costs["gather"] + costs["publish"]
    after = costs["logp"] + costs["advantage"] + costs["update"]
    devices = costs["logp"] + costs["update"] + costs["gather"]
    left = list(work.answers)

    def admit(count: int, now: float, version: int) -> list[tuple[float, int]]:
        drawn, left[:count] = left[:count], []
        return [(now + seconds, version + max_lag + 1) for seconds in drawn]

    groups, ends = admit(GROUPS * (depth + 1), serve, 0), [0.0]
    for step in range(1, STEPS + 1):
        enough = sorted(finished for finished, _ in groups)[GROUPS * step - 1]
        due = max((finished for finished, by in groups if by <= step), default=0.0)
        ends.append(max(max(enough, due) + after, ends[-1] + devices))
        groups += admit(GROUPS, ends[-1] + serve, step)
    return ends[1:]


@pytest.mark.slow
@pytest.mark.parametrize(("max_lag", "depth"), [(3, 3), (6, 3)])
def test_no_schedule_within_the_same_lag_is_a_tenth_faster(max_lag: int, depth: int) -> None:
    shares = []
    for seed in range(20):
        work = Workload(seed)
        bound, ends = earliest(work, max_lag, depth)[MEASURED], measured(work, max_lag, depth)[MEASURED]
        shares.append((bound[-1] - bound[0]) / (ends[-1] - ends[0]))
    assert min(shares) >= 0.9
    assert fmean(shares) >= 0.98


FIXED = 0.2
"""Share of a stage that more devices do not make shorter: fetching, balancing, waiting for the slowest,
the optimizer.
"""
WORK = {"update": 10.0, "logp": 2.0, "ref_logp": 2.0}
"""Seconds on one device: log-probs cost 40 % of training."""


def step_s(devices: dict[str, int], places: dict[str, str]) -> float:
    """Seconds a step, when generation is never what is waited for."""
    costs = {name: work * (FIXED + (1 - FIXED) / devices[name]) for name, work in WORK.items()}
    trainer = SimTrainer(
        max_lag=2,
        steps=STEPS,
        costs=costs,
        places=places,
        old="logp_pool" if places else "trainer",
        answer_s=lambda step, index: 0.5,
    )
    flow = AsyncTrainingFlow(trainer)
    run_virtual(flow.run())
    ends = [record.t for record in flow.log.records if record.event == "TRAINED"][MEASURED]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def test_separate_pools_beat_the_serial_step_where_stages_do_not_scale() -> None:
    together = step_s({"update": 8, "logp": 8, "ref_logp": 8}, {})
    apart = step_s({"update": 6, "logp": 1, "ref_logp": 1}, {"logp": "logp", "ref_logp": "ref"})
    assert together / apart >= 1.25
