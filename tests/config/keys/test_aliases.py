# SPDX-License-Identifier: Apache-2.0
"""The table of keys of other systems, and the settings of whole scripts for images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.config.keys import aliases
from recipe.async_pipeline.config.keys.aliases import FOREIGN, SET_BY_OTHERS, losses_of_images
from recipe.async_pipeline.config.keys.translation import resolve
from recipe.async_pipeline.config.knobs.schema import knob_paths
from tests.fakes.alias_values import ACTOR, FLAT, LOSS, NESTED, nested


def test_a_script_with_flat_keys() -> None:
    found = resolve(nested(*FLAT.items()))
    how = found.config.diffusion
    assert (found.config.strategy, found.config.reward.while_generating) == ("one_step_off", True)
    assert (how.noise_level, how.sde_type, how.sde_window_size) == (0.8, "cps", 3)
    assert (how.sde_window_first, how.sde_window_end) == (0, 5)
    assert (how.num_inference_steps, how.height, how.width) == (10, 384, 384)
    assert found.verl == {"trainer.n_gpus_per_node": 2, f"{LOSS}.loss_mode": "vanilla"}


def test_a_script_with_nested_keys() -> None:
    found = resolve(nested(*NESTED.items()))
    how = found.config.diffusion
    assert (how.noise_level, how.sde_type, how.sde_window_size) == (0.8, "cps", 3)
    assert (how.validation_steps, how.max_sequence_length, how.height) == (28, 256, 384)
    assert found.verl == {f"{ACTOR}.clip_ratio{end}": 1e-5 for end in ("", "_low", "_high")}


@pytest.mark.parametrize("path", ["trainer.clip_ratio", "actor_rollout_ref.rollout.loss_mode", "data.seed"])
def test_names_that_verl_has_too_are_left_alone(path: str) -> None:
    resolve(nested((path, 0.2)))


def test_every_key_sets_knobs() -> None:
    assert set(knob_paths()) >= SET_BY_OTHERS


def test_every_key_is_found_by_a_search_of_the_source() -> None:
    source = Path(aliases.__file__).read_text(encoding="utf-8")
    assert [key.path for key in FOREIGN if f'"{key.path}"' not in source] == []


@pytest.mark.parametrize(("mode", "loss"), [("flow_grpo", {f"{LOSS}.loss_mode": "vanilla"}), ("gspo", {})])
def test_flow_grpo_is_verls_own_loss(mode: str, loss: dict[str, Any]) -> None:
    assert losses_of_images(nested((f"{LOSS}.loss_mode", mode))) == loss
