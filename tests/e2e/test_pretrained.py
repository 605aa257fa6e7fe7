# SPDX-License-Identifier: Apache-2.0
"""A pretrained model is trained as the tiny ones are; `test_ladder` compares it with verl's own trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.job import FEW, WORDS, check_clean_end, check_events, run_job, smoke_command

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]
STEPS = 3
KL_MAX = 0.001
"""Of one policy between the trainer's log-probs and the engine's, both in float32."""


def test_adapters_are_trained_and_served(words_task: Path, tmp_path: Path) -> None:
    job = run_job(
        smoke_command(
            *WORDS,
            "async_strategy=on_policy",
            f"trainer.total_training_steps={STEPS}",
            "actor_rollout_ref.model.lora_rank=8",
            "actor_rollout_ref.rollout.load_format=auto",
            f"trainer.v1.async_pipeline.run_dir={tmp_path / 'run'}",
        ),
        tmp_path / "run",
        words_task,
    )
    summary = check_clean_end(job, "on_policy", 0, STEPS, groups=FEW, responses=FEW)
    check_events(job)
    assert summary["rollout_corr_kl_max"] <= KL_MAX
    assert summary["reward_first"] > 0, "the model was pretrained"
