# SPDX-License-Identifier: Apache-2.0
"""Candidates of a search: layouts and strategies that a real run would accept."""

from __future__ import annotations

import msgspec

from recipe.async_pipeline.tools.plan.candidates import MEASURED_STEPS, candidates_of, measured_steps
from recipe.async_pipeline.tools.plan.profile import Answers, Profile, Stage, Stages
from recipe.async_pipeline.tools.plan.simulation import LEAST_STEPS
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
