# SPDX-License-Identifier: Apache-2.0
"""A name is offered for a misspelled one, and not for one that means something else."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.config.paths import nearest

KNOWN = ("max_prompt_length", "ppo_mini_batch_size", "gpu_memory_utilization", "nnodes", "bypass_mode")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_promt_lenght", "max_prompt_length"),
        ("MAX_PROMPT_LENGTH", "max_prompt_length"),
        ("ppo_minibatch_size", "ppo_mini_batch_size"),
        ("gpu_memory_util", "gpu_memory_utilization"),
        ("nodes", "nnodes"),
        ("bypas_mode", "bypass_mode"),
        ("max_obs_length", None),
        ("max_start_length", None),
        ("traj_mini_batch_size", None),
        ("ppo_micro_batch_size", None),
    ],
)
def test_a_misspelled_name_resembles_each_word_of_the_known_one(name: str, near: str | None) -> None:
    assert nearest(name, KNOWN) == near


def test_a_name_that_lacks_a_word_is_meant_for_the_only_one_that_has_its_words() -> None:
    steps = ("total_training_steps", "total_epochs")
    assert nearest("total_steps", steps) == "total_training_steps"
    assert nearest("batch_size", ("val_batch_size", "train_batch_size")) is None


def test_a_short_name_is_meant_for_one_with_its_first_letter() -> None:
    assert nearest("foo", ("opo", "gae")) is None
    assert nearest("rlo", ("opo", "rloo")) == "rloo"
