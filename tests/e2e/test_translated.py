# SPDX-License-Identifier: Apache-2.0
"""Files of ROLL, translated, and a command line of verl's fully asynchronous trainer become runs that train:
with a tiny model, two cores and fewer samples.

Every override that the translation prints is in the command; what the machine cannot hold follows it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.async_pipeline.config.keys.entry_points import FULLY_ASYNC
from recipe.async_pipeline.config.keys.overrides import hydra_value
from recipe.async_pipeline.tools.ledger.file import audit_file
from recipe.async_pipeline.tools.translate.rules import leaves
from tests.e2e.job import ROOT, Job, check_events, run_job, smoke_command

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]
with_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="no megatron")
FILES = ROOT / "tests" / "tools" / "translate"
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


@with_megatron
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


@with_megatron
def test_the_rlvr_file_trains(tied_task: Path, tmp_path: Path) -> None:
    """With SGLang and two tensor parallel ranks, as in the file."""
    run_dir = tmp_path / "run"
    command = smoke_command(
        *translated("roll_rlvr"),
        f"trainer.v1.async_pipeline.run_dir={run_dir}",
        *smaller(2, (8, 4, 64)),
    )
    check_trained(run_job(command, run_dir, tied_task))


def fully_async(run_dir: Path) -> list[str]:
    """Return words for verl's fully asynchronous trainer: of a user, after the ones for a CPU."""
    smoke = [ROOT / "configs" / name for name in ("smoke_cpu.yaml", "training_engine/fsdp2.yaml")]
    cpu = OmegaConf.to_container(OmegaConf.merge(*map(OmegaConf.load, smoke)))
    assert isinstance(cpu, dict)
    left_out = ("hydra.", "defaults", f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node", "trainer.total_")
    values = {str(key): value for key, value in cpu.items()}
    return [
        *(f"++{key}={hydra_value(value)}" for key, value in leaves(values) if not key.startswith(left_out)),
        "data.train_batch_size=0",
        "data.gen_batch_size=1",
        "rollout.nnodes=1",
        "rollout.n_gpus_per_node=1",
        f"rollout.total_rollout_steps={16 * STEPS}",
        "async_training.staleness_threshold=0.5",
        "async_training.trigger_parameter_sync_step=2",
        "async_training.partial_rollout=True",
        # Of older verl.
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=1024",
        f"++trainer.v1.async_pipeline.run_dir={run_dir}",
    ]


def test_a_command_line_of_verls_fully_async_trainer_trains(tied_task: Path, tmp_path: Path) -> None:
    """With the one change that `explain` prints."""
    run_dir = tmp_path / "run"
    words = fully_async(run_dir)
    python = [sys.executable, "-m"]
    explained = subprocess.run(
        [*python, "recipe.async_pipeline", "explain", *words],
        cwd=ROOT,
        env={**os.environ, "ASYNC_PIPELINE_TASK": str(tied_task)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"python -m {FULLY_ASYNC.module}, and add +async_pipeline=True" in explained.stdout

    job = run_job([*python, FULLY_ASYNC.module, *words, "+async_pipeline=True"], run_dir, tied_task)
    assert job.status == 0, job.output[-3000:]
    summary = job.summary
    assert (summary["status"], summary["strategy"], summary["steps"]) == ("completed", "fully_async", STEPS)
    assert summary["lag_max"] <= summary["max_lag"] == 2, "1.5 x 2 batches in flight or waiting"
    assert summary["groups_trained"] == 16 * STEPS
    check_events(job)
    assert audit_file(job.run_dir).violations == []
