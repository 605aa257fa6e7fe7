# SPDX-License-Identifier: Apache-2.0
"""Whole jobs on the real stack: verl, Ray, FSDP2, vLLM, TransferQueue."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from recipe.async_pipeline.core.role import ROLES
from tests.e2e.job import check_clean_end, check_events, run_job, smoke_command

pytestmark = pytest.mark.e2e


def prompts_by_step(folder: Path, steps: int) -> list[Counter[str]]:
    """The prompts that verl dumped for each optimizer step, each as often as it was answered."""
    return [
        Counter(json.loads(line)["input"] for line in (folder / f"{step}.jsonl").read_text().splitlines())
        for step in range(1, steps + 1)
    ]


def test_on_policy_trains_the_prompts_of_verls_own_sync_trainer(tied_task: Path, tmp_path: Path) -> None:
    steps = 4
    dump = tmp_path / "ours"
    ours = run_job(
        smoke_command(
            "async_strategy=on_policy",
            f"trainer.total_training_steps={steps}",
            f"trainer.rollout_data_dir={dump}",
            f"trainer.v1.async_pipeline.run_dir={tmp_path / 'run'}",
            "trainer.val_before_train=true",
            "trainer.test_freq=4",
        ),
        tmp_path / "run",
        tied_task,
    )
    summary = check_clean_end(ours, "on_policy", 0, steps)
    check_events(ours, set(ROLES) - {"ref_logp"})
    assert summary["lag_max"] == 0
    assert summary["rollout_corr_kl_max"] <= 0.005
    validated = [m["data"]["async_pipeline/validation/version"] for m in ours.metrics() if "async_pipeline/validation/version" in m["data"]]
    assert validated == [0, 4]

    stock_dump = tmp_path / "stock"
    stock = run_job(
        smoke_command(
            f"trainer.total_training_steps={steps}",
            f"trainer.rollout_data_dir={stock_dump}",
            "actor_rollout_ref.rollout.nnodes=0",
            "trainer.experiment_name=stock",
            f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
            # verl's colocated loader has no repair for the repack of vLLM's CPU layers; ours does it.
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls="
            "recipe.async_pipeline.verl_bridge.vllm_worker.PipelineWorkerExtension",
            pipeline=False,
        ),
        tmp_path / "stock-run",
        tied_task,
    )
    assert stock.status == 0, stock.output[-3000:]
    assert prompts_by_step(dump, steps) == prompts_by_step(stock_dump, steps)


def test_n_step_ahead_with_a_reference_policy_untied_in_bf16(untied_task: Path, tmp_path: Path) -> None:
    """Three batches ahead, all eight roles, two training ranks, and weights that are cast on their way."""
    job = run_job(
        smoke_command(
            "async_strategy=n_step_ahead",
            "trainer.v1.async_pipeline.max_lag=3",
            "trainer.total_training_steps=8",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.rollout.dtype=bfloat16",
            "trainer.n_gpus_per_node=2",
            "ray_kwargs.ray_init.num_gpus=3",
            f"trainer.v1.async_pipeline.run_dir={tmp_path / 'run'}",
        ),
        tmp_path / "run",
        untied_task,
    )
    summary = check_clean_end(job, "n_step_ahead", 3, 8)
    check_events(job, set(ROLES))
    assert summary["lag_max"] == 3
    assert summary["overlap_s"] > 0
    assert "actor/kl_loss" in job.metrics()[-1]["data"]
