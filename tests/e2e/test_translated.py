# SPDX-License-Identifier: Apache-2.0
"""Two published files of ROLL, translated, train: with a tiny model, two cores and fewer samples.

Every override that the translation prints is in the command; what the machine cannot hold follows it.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from recipe.async_pipeline.observe.ledger_file import audit_file
from tests.e2e.job import ROOT, Job, check_events, run_job, smoke_command

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("megatron") is None, reason="no megatron"),
]
FILES = ROOT / "tests" / "config" / "foreign_files"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FLOAT32 = "recipe.async_pipeline.verl_bridge.workers.megatron.config.Float32EngineConfig"
STEPS, GROUPS, SAMPLES = 3, 8, 4
INSTEAD = {
    # smoke_command has the switch, and the configuration the attention: flash-attn is for GPUs.
    "+async_pipeline=true": [],
    "+actor_rollout_ref.model.override_config.attn_implementation='flash_attention_2'": [],
    "model_engine='megatron'": ["training_engine=megatron"],
}
"""What the smoke configuration has in place of lines that are for verl's own."""


def smaller(training: int, sizes: tuple[int, int, int]) -> list[str]:
    """Return what two cores need: `training` devices, `sizes` in tokens of prompt, response and both."""
    prompt, response, both = sizes
    return [
        "actor_rollout_ref.model.path=${oc.env:ASYNC_PIPELINE_TASK}/model",
        f"{ACTOR}.megatron._target_={FLOAT32}",
        f"{ACTOR}.megatron.dtype=float32",
        f"actor_rollout_ref.ref.megatron._target_={FLOAT32}",
        "actor_rollout_ref.ref.megatron.dtype=float32",
        f"critic.megatron._target_={FLOAT32}",
        "critic.megatron.dtype=float32",
        f"{ROLLOUT}.dtype=float32",
        f"{ROLLOUT}.load_format=dummy",
        f"data.train_batch_size={GROUPS}",
        f"data.max_prompt_length={prompt}",
        f"data.max_response_length={response}",
        f"{ROLLOUT}.max_model_len={both}",
        f"{ROLLOUT}.n={SAMPLES}",
        f"{ACTOR}.ppo_mini_batch_size={GROUPS}",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu={GROUPS}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={GROUPS}",
        f"trainer.total_training_steps={STEPS}",
        f"{ACTOR}.optim.lr_warmup_steps=1",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={training}",
        f"{ROLLOUT}.nnodes=1",
        f"{ROLLOUT}.n_gpus_per_node=1",
        f"ray_kwargs.ray_init.num_gpus={training + 1}",
    ]


def translated(name: str) -> list[str]:
    """Return what a user copies from the terminal."""
    command = [
        sys.executable,
        "-m",
        "recipe.async_pipeline",
        "translate",
        "roll",
        str(FILES / f"{name}.yaml"),
    ]
    done = subprocess.run([*command, "--overrides"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [override for line in done.stdout.splitlines() for override in INSTEAD.get(line, [line])]


def check_trained(job: Job) -> None:
    assert job.status == 0, job.output[-3000:]
    summary = job.summary
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    assert summary["max_lag"] == 1 and summary["lag_max"] <= 1, "async_generation_ratio=1"
    assert summary["served_version"] == summary["trainer_version"] == STEPS
    assert summary["groups_trained"] == STEPS * GROUPS
    assert summary["samples_trained"] == STEPS * GROUPS * SAMPLES
    check_events(job)
    assert audit_file(job.run_dir).violations == []


def test_the_agentic_file_trains(lake_task: Path, tmp_path: Path) -> None:
    agentic = "trainer.v1.async_pipeline.agentic"
    environment = [
        f"{agentic}.environment=frozen_lake",
        f"+{agentic}.environment_kwargs={{size:4,frozen:0.8}}",
        f"{agentic}.max_turns=4",
    ]
    run_dir = tmp_path / "run"
    command = smoke_command(
        *translated("roll_agentic"),
        f"trainer.v1.async_pipeline.run_dir={run_dir}",
        *environment,
        "reward.custom_reward_function.path=null",
        # vLLM's CPU build has other block sizes.
        f"{ROLLOUT}.engine_kwargs.vllm.block_size=32",
        *smaller(1, (32, 64, 128)),
    )
    check_trained(run_job(command, run_dir, lake_task))


def test_the_rlvr_file_trains(tied_task: Path, tmp_path: Path) -> None:
    """With SGLang and two tensor parallel ranks, as in the file."""
    run_dir = tmp_path / "run"
    command = smoke_command(
        *translated("roll_rlvr"),
        f"trainer.v1.async_pipeline.run_dir={run_dir}",
        *smaller(2, (8, 4, 64)),
    )
    check_trained(run_job(command, run_dir, tied_task))
