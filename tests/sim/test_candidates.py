# SPDX-License-Identifier: Apache-2.0
"""Candidates of a search: layouts and strategies that a real run would accept."""

from __future__ import annotations

import msgspec

from recipe.async_pipeline.sim.candidates import candidates_of
from recipe.async_pipeline.sim.profile import Stage, Stages
from tests.sim.workloads import LONG_TAIL


def test_no_candidate_has_more_lag_than_allowed() -> None:
    assert {c.setting.knobs.staleness.max_lag for c in candidates_of(LONG_TAIL, 16, 1, 1)} == {0, 1}


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
