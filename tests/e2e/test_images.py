# SPDX-License-Identifier: Apache-2.0
"""Whole jobs of an image policy: Flow-GRPO on the real stack, with lag, proof and ledger as in any run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from recipe.async_pipeline.tools.ledger.file import audit_file
from recipe.async_pipeline.tools.report.figures.data import data_of
from recipe.async_pipeline.tools.report.figures.run_reader import read_run
from recipe.async_pipeline.tools.report.page import run_page
from tests.e2e import image_reference, resumes
from tests.e2e.conftest import make_task
from tests.e2e.image_sabotage import ADAPTER, BUFFER, FOLDER, KILLED, TENSOR
from tests.e2e.job import ROOT, Event, Job, check_events, interrupt, run_job, smoke_command
from tests.e2e.weights import saved_shards, saved_weights
from tests.fakes.alias_values import GERL_SCRIPTS

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]
pytest.importorskip("diffusers")
LAGS = {"on_policy": 0, "fully_async": 3}
GROUPS, SAMPLES, TENSORS = 12, 8, 67
"""Prompts of a step, images of each, and tensors of the transformer."""
GAIN = 0.25
ROUNDING = 1e-6
"""Largest difference of a weight after eight steps on two ranks, which add gradients in another order."""


@pytest.fixture(scope="session")
def image_task() -> Path:
    return make_task("--task", "image")


BACK = "serves again, version "


def train(
    task: Path, folder: Path, strategy: str, steps: int, *overrides: str, events: Sequence[Event] = ()
) -> Job:
    command = smoke_command(
        "+task=image",
        f"async_strategy={strategy}",
        f"trainer.total_training_steps={steps}",
        f"trainer.v1.async_pipeline.run_dir={folder}",
        *overrides,
    )
    return run_job(command, folder, task, events=events)


def check_images(job: Job, strategy: str, steps: int) -> dict[str, Any]:
    assert job.status == 0, job.output[-3000:]
    summary = job.summary
    assert (summary["status"], summary["strategy"], summary["steps"]) == ("completed", strategy, steps)
    assert summary["lag_max"] <= summary["max_lag"] == LAGS[strategy]
    assert summary["served_version"] == summary["trainer_version"] == steps
    assert summary["groups_trained"] == steps * GROUPS
    assert summary["samples_trained"] == steps * GROUPS * SAMPLES
    assert (summary["groups_failed"], summary["groups_in_flight"]) == (0, 0)
    assert summary["tensors_proved"] > 0
    check_events(job)
    return summary


def check_pictures(job: Job, steps: int) -> None:
    """Each step has its four pictures, and the report shows them with the version that drew them."""
    files = read_run(job.run_dir)
    assert [one.step for one in files.pictures] == [step for step in range(1, steps + 1) for _ in range(4)]
    assert all(one.first_version == one.last_version == one.step - 1 for one in files.pictures)
    assert {one.reward for one in files.pictures} <= {0.0, 0.5, 1.0}
    assert {one.png[:8] for one in files.pictures} == {b"\x89PNG\r\n\x1a\n"}
    page = run_page(data_of(files))
    assert page.count("<img ") == 4 * steps and f"version {steps - 1}" in page


RECOMPUTED = "trainer.v1.async_pipeline.training.old_logp=trainer"


def check_agreement(job: Job, steps: int) -> None:
    """Sampler and trainer have the same log-probs, bit for bit, in every step, and the weights move."""
    summary = check_images(job, "on_policy", steps)
    assert summary["rollout_corr_kl_max"] == 0.0
    rows = [row["data"] for row in job.metrics() if "actor/ppo_kl" in row["data"]]
    assert len(rows) == steps
    for row in rows:
        assert row["actor/ppo_kl"] == row["actor/pg_clipfrac"] == 0.0
        assert row["training/rollout_probs_diff_max"] == 0.0
        assert row["actor/grad_norm"] > 0


def test_flux_is_trained_as_it_is_drawn(tmp_path: Path) -> None:
    """A guidance-distilled FLUX: its guidance is an input, and its latents travel as sequences of patches."""
    task = make_task("--task", "image", "--family", "flux")
    job = train(task, tmp_path / "run", "on_policy", 2, RECOMPUTED)
    check_agreement(job, 2)
    check_pictures(job, 2)


def test_the_reward_grows_at_a_lag_of_three(image_task: Path, tmp_path: Path) -> None:
    job = train(image_task, tmp_path / "run", "fully_async", 40)
    summary = check_images(job, "fully_async", 40)
    assert summary["reward_last"] - summary["reward_first"] >= GAIN


def test_on_policy_is_the_synchronous_loop(image_task: Path, tmp_path: Path) -> None:
    """Eight guided steps through Ray, the sample store and the arenas, against one process without any of
    them: the same scores, gradient norms and weights, bit for bit. Sampler and trainer agree bit for bit,
    too, so every ratio is exactly 1, although their bound is 1e-3.
    """
    steps, checkpoints = 8, tmp_path / "checkpoints"
    overrides = (
        "data.shuffle=false",
        f"trainer.test_freq={steps}",
        f"trainer.save_freq={steps}",
        f"trainer.default_local_dir={checkpoints}",
        f"trainer.v1.async_pipeline.diffusion.guidance_scale={image_reference.GUIDANCE}",
        RECOMPUTED,
    )
    job = train(image_task, tmp_path / "run", "on_policy", steps, *overrides)
    check_agreement(job, steps)
    validated = [row["data"] for row in job.metrics() if any(k.startswith("val-core") for k in row["data"])]
    assert validated, "samples without noise are scored"
    check_pictures(job, steps)

    weights = saved_weights(checkpoints, steps)
    reference = check_reference(image_task, steps, job, weights, apart=0.0, guided=True)
    rows = [row["data"] for row in job.metrics() if "actor/grad_norm" in row["data"]]
    assert [row["actor/grad_norm"] for row in rows] == reference.grad_norms


def check_reference(
    task: Path, steps: int, job: Job, trained: Mapping[str, Any], *, apart: float, guided: bool = False
) -> image_reference.Result:
    """The job has drawn the images of the synchronous loop in each step, and trained its weights; none is
    further `apart`.
    """
    batches = image_reference.batches(task, GROUPS, steps)
    reference = image_reference.train(task / "model", batches, guided=guided)
    rows = [row["data"] for row in job.metrics() if "actor/grad_norm" in row["data"]]
    assert [row["critic/score/mean"] for row in rows] == reference.rewards
    wanted = reference.weights
    assert trained.keys() == wanted.keys()
    for name, weight in trained.items():
        assert float((weight - wanted[name]).abs().max()) <= apart, name
    return reference


def test_two_ranks_that_are_killed_and_resumed_are_the_synchronous_loop(
    image_task: Path, tmp_path: Path
) -> None:
    """The noise of an image follows from its place in the data, so a resumed run draws it again."""
    steps, checkpoints, run_dir = 8, tmp_path / "checkpoints", tmp_path / "run"
    overrides = (
        "data.shuffle=false",
        "trainer.save_freq=2",
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir={checkpoints}",
        "trainer.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=3",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=48",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=48",
    )
    kill = Event(f" 3/{steps} ", lambda process: resumes.kill_all(process, run_dir))
    first = train(image_task, run_dir, "on_policy", steps, *overrides, events=[kill])
    assert first.status != 0
    last = train(image_task, run_dir, "on_policy", steps, *overrides)
    resumes.ended_well(last, steps, GROUPS)
    assert " resumed from " in last.output and audit_file(run_dir).processes == 2
    check_reference(image_task, steps, last, saved_shards(checkpoints, steps, 2), apart=ROUNDING)


ON_THIS_MACHINE = {
    "trainer.device": "cpu",
    "trainer.total_training_steps": 3,
    "trainer.total_epochs": 100,
    "trainer.val_before_train": False,
    "trainer.test_freq": 3,
    "trainer.save_freq": -1,
    "trainer.logger": ["file"],
    "data.dataloader_num_workers": 0,
    "data.max_prompt_length": 8,
    "data.val_max_samples": 4,
    "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
    "actor_rollout_ref.rollout.dtype": "float32",
    "actor_rollout_ref.rollout.image_height": 16,
    "actor_rollout_ref.rollout.image_width": 16,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "reward.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "+ray_kwargs.ray_init.num_gpus": 3,
    "+ray_kwargs.ray_init.include_dashboard": False,
    "ray_kwargs.ray_init.num_cpus": 64,
    "trainer.v1.async_pipeline.diffusion.max_sequence_length": 6,
    "trainer.v1.async_pipeline.faults.strict_observers": True,
}
"""What a script for GPUs and a large model must change for two cores and the small one."""


def test_a_script_of_gerl_runs_from_the_entry_point_for_images(image_task: Path, tmp_path: Path) -> None:
    """One device trains an adapter and two draw, by noise of kind cps, as the script says."""
    script, run_dir = GERL_SCRIPTS["3p_a1_r2"], tmp_path / "run"
    keys = {
        **script.keys,
        **ON_THIS_MACHINE,
        "data.train_files": str(image_task / "train.parquet"),
        "data.val_files": str(image_task / "val.parquet"),
        "actor_rollout_ref.model.path": str(image_task / "model"),
        "reward.custom_reward_function.path": "pkg://recipe.async_pipeline.lab.tasks.image_task.image_reward",
        "trainer.v1.async_pipeline.run_dir": str(run_dir),
    }
    overrides = [f"{path}={json.dumps(value)}" for path, value in keys.items()]
    command = [sys.executable, "-m", "recipe.async_pipeline.verl_bridge.main_flowgrpo", *overrides]
    job = run_job(command, run_dir, image_task)
    assert job.status == 0, job.output[-3000:]
    summary = job.summary
    assert (summary["status"], summary["strategy"], summary["steps"]) == ("completed", "one_step_off", 3)
    assert summary["lag_max"] <= summary["max_lag"] == 1
    assert summary["served_version"] == summary["trainer_version"] == 3
    assert (summary["groups_trained"], summary["samples_trained"]) == (3 * script.batch, 3 * script.batch * 8)
    assert (summary["groups_failed"], summary["groups_in_flight"]) == (0, 0)
    assert summary["tensors_proved"] > 0
    check_events(job)
    # The data are scored while other images are drawn, and every step moves the adapter.
    rows = [row["data"] for row in job.metrics() if "actor/grad_norm" in row["data"]]
    assert len(rows) == 3 and all(row["actor/grad_norm"] > 0 for row in rows)


def sabotage(folder: Path, monkeypatch: pytest.MonkeyPatch, *faults: str) -> None:
    folder.mkdir()
    for one in faults:
        (folder / f"{one}.fault").touch()
    monkeypatch.setenv(FOLDER, str(folder))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "tests.e2e.image_sabotage")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_what_is_not_delivered_is_noticed_and_a_replica_that_dies_in_a_load_comes_back(
    image_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three replicas: one lacks a weight, one a buffer, one is killed."""
    sabotage(tmp_path / "faults", monkeypatch, TENSOR, BUFFER, KILLED)
    run_dir = tmp_path / "run"
    job = train(
        image_task,
        run_dir,
        "one_step_off",
        1000,
        "actor_rollout_ref.rollout.n_gpus_per_node=3",
        "ray_kwargs.ray_init.num_gpus=4",
        events=[Event(BACK), Event(BACK), Event(BACK), Event("/1000 "), Event("/1000 ", interrupt)],
    )
    assert job.summary["status"] == "interrupted", job.output[-3000:]
    assert not list((tmp_path / "faults").glob("*.fault")), "each fault has happened"
    for name in (TENSOR, BUFFER):
        assert re.search(rf"ProofError\b.*{re.escape(name)} ", job.output), name
    events = [event["event"] for event in job.events()]
    assert events.count("FENCED") == events.count("REJOINED") == 3
    assert audit_file(run_dir).violations == []


def test_an_adapter_is_trained_and_served(
    image_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Flow-GRPO's public settings: guidance, a divergence in the loss, and a moving average. An adapter
    that is not delivered to one of two replicas is noticed at the first version.
    """
    sabotage(tmp_path / "faults", monkeypatch, ADAPTER)
    checkpoints = tmp_path / "checkpoints"
    lora = (
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.lora_alpha=8",
        "actor_rollout_ref.rollout.load_format=auto",
        "actor_rollout_ref.actor.optim.lr=2e-3",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=3",
        "trainer.v1.async_pipeline.diffusion.guidance_scale=4.5",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.04",
        "trainer.v1.async_pipeline.diffusion.ema_decay=0.9",
        "trainer.v1.async_pipeline.diffusion.ema_every=2",
        "trainer.save_freq=5",
        f"trainer.default_local_dir={checkpoints}",
    )
    job = train(image_task, tmp_path / "run", "on_policy", 5, *lora)
    check_images(job, "on_policy", 5)
    assert re.search(rf"ProofError\b.*v0: \S*{re.escape(ADAPTER)} ", job.output)
    rows = [row["data"] for row in job.metrics() if "actor/ppo_kl" in row["data"]]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    # The adapter is 0 before the first step.
    kl = [row["actor/kl_loss"] for row in rows]
    assert kl[0] == 0 < min(kl[1:])
    average = checkpoints / "global_step_5" / "actor" / "average" / "adapter_model.safetensors"
    assert any(one.abs().max() > 0 for name, one in load_file(average).items() if "lora_B" in name)
    # The old log-probs are the rollout's: it draws with the adapter that the trainer has.
    assert max(abs(row["actor/ppo_kl"]) for row in rows) <= ROUNDING
