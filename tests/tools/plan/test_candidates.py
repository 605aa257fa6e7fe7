# SPDX-License-Identifier: Apache-2.0
"""Candidates of a search: layouts and strategies that a real run would accept."""

from __future__ import annotations

import msgspec
import pytest

from recipe.async_pipeline.tools.plan.candidates import MEASURED_STEPS, candidates_of, measured_steps
from recipe.async_pipeline.tools.plan.layout import fits, pools_of
from recipe.async_pipeline.tools.plan.profile import Answers, Batch, Profile, Stage, Stages
from recipe.async_pipeline.tools.plan.simulated.simulation import LEAST_STEPS
from tests.tools.plan.workloads import LONG_TAIL


def test_no_candidate_has_more_lag_than_allowed() -> None:
    assert {c.setting.knobs.staleness.max_lag for c in candidates_of(LONG_TAIL, 16, 1, 1)} == {0, 1}


def with_turns(turns: float) -> Profile:
    return msgspec.structs.replace(LONG_TAIL, answers=Answers(tokens=100.0, turns=turns))


def test_the_more_turns_a_step_has_the_fewer_steps_are_simulated() -> None:
    """A step of 128 prompts has 1,024 responses of this profile."""
    assert measured_steps(with_turns(1.0), 128, 1) == MEASURED_STEPS
    assert measured_steps(with_turns(20.0), 128, 1) == 160_000 // 20_480
    assert measured_steps(with_turns(100.0), 512, 1) == LEAST_STEPS


def test_every_shape_of_a_run_with_all_roles_is_tried() -> None:
    of = msgspec.structs.replace(
        LONG_TAIL,
        stages=Stages(
            update=Stage(token_s=1e-3),
            logp=Stage(token_s=2e-4),
            ref_logp=Stage(token_s=2e-4),
            values=Stage(),
            critic=Stage(token_s=1e-3),
        ),
    )
    found = {c.shape for c in candidates_of(of, 32, 1, 1)}
    assert found == {
        "together",
        "reference apart",
        "log-probs apart",
        "four pools",
        "critic apart",
        "critic and reference apart",
    }


def test_layouts_obey_nodes_replicas_and_batches() -> None:
    of = msgspec.structs.replace(LONG_TAIL, devices_per_replica=4)
    for candidate in candidates_of(of, 32, 1, 1):
        setting = candidate.setting
        assert setting.placement.devices <= 32
        assert setting.devices_of("generate") % 4 == 0
        assert setting.groups * 8 % setting.devices_of("train") == 0


@pytest.mark.parametrize(
    ("replica", "node", "devices", "generates"),
    [(3, 8, 14, {6}), (6, 8, 14, {6}), (5, 7, 11, {5}), (4, 8, 12, {4, 8}), (16, 8, 32, {16})],
)
def test_replicas_may_leave_a_part_of_a_node_to_training(
    replica: int, node: int, devices: int, generates: set[int]
) -> None:
    of = msgspec.structs.replace(LONG_TAIL, devices_per_replica=replica, devices_per_node=node)
    found = {candidate.setting.devices_of("generate") for candidate in candidates_of(of, devices, 1, 1)}
    assert generates <= found


def sizes(of: Profile, devices: int) -> set[tuple[tuple[int, ...], int]]:
    """The devices of each pool, the rollout's last, and the idle devices."""
    return {
        (tuple(pool.devices for pool in candidate.setting.placement.pools), candidate.idle)
        for candidate in candidates_of(of, devices, 1, 1)
    }


@pytest.mark.parametrize(
    ("replica", "devices", "batch", "expected"),
    [
        # Whole nodes for training and replicas leave one device: for log-probs, or for nothing.
        (16, 25, Batch(groups_per_device=2.0, answers=8), {((8, 16), 1), ((8, 1, 16), 0)}),
        # The node that is not full has the log-probs.
        (4, 28, Batch(groups_per_device=2.0, answers=8), {((16, 8), 4), ((16, 4, 8), 0)}),
        # Seven devices do not divide the batch.
        (8, 15, Batch(groups=8, answers=8), {((4, 8), 3)}),
        (4, 11, Batch(groups=8, answers=8), {((4, 4), 3), ((2, 8), 1)}),
        # A batch has work for few trainers; engines get the rest.
        (8, 1000, Batch(groups=8, answers=8), {((64, 936), 0)}),
    ],
)
def test_devices_that_no_pool_can_use_stay_idle(
    replica: int, devices: int, batch: Batch, expected: set[tuple[tuple[int, ...], int]]
) -> None:
    of = msgspec.structs.replace(LONG_TAIL, devices_per_replica=replica, batch=batch)
    assert expected <= sizes(of, devices)


@pytest.mark.parametrize("devices", range(2, 34))
@pytest.mark.parametrize("replica", [1, 3, 4, 16])
def test_no_pool_could_have_an_idle_device(replica: int, devices: int) -> None:
    of = msgspec.structs.replace(LONG_TAIL, devices_per_replica=replica)
    for candidate in candidates_of(of, devices, 0, 1):
        pools = candidate.setting.placement.pools
        for larger in pools if candidate.idle else ():
            training = {
                pool.roles: pool.devices + (pool is larger) for pool in pools if pool.name != "generate"
            }
            generate = candidate.setting.devices_of("generate") + replica * (larger.name == "generate")
            assert not fits(of, pools_of(training, generate), devices), candidate


def test_the_devices_of_a_node_that_is_not_full_are_counted() -> None:
    """Nodes of 8 and 4 devices have no room for 5 and 5."""
    of = msgspec.structs.replace(LONG_TAIL, batch=Batch(groups=15, answers=8))
    assert not fits(of, pools_of({("train",): 5, ("logp",): 5}, 2), 12)
    assert fits(of, pools_of({("train",): 5, ("logp",): 4}, 3), 12)


def test_large_lags_are_tried_in_steps() -> None:
    of = msgspec.structs.replace(LONG_TAIL, batch=Batch(groups=2, answers=1))
    lags = {candidate.setting.knobs.staleness.max_lag for candidate in candidates_of(of, 2, 1000, 1)}
    assert lags >= set(range(33))
    assert len(lags) < 70
