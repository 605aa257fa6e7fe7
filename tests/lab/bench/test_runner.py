# SPDX-License-Identifier: Apache-2.0
"""The order of jobs, their command lines, and the errors of failed jobs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from omegaconf import OmegaConf

from recipe.async_pipeline.lab import job
from recipe.async_pipeline.lab.bench import runner
from recipe.async_pipeline.lab.bench.inputs.arms import ARMS
from recipe.async_pipeline.lab.bench.inputs.waits import LognormalWait
from recipe.async_pipeline.lab.bench.inputs.workload import EpisodeWorkload, Workload, load
from recipe.async_pipeline.lab.bench.runner import (
    Job,
    JobFailed,
    command_of,
    jobs_in_turns,
    overrides_of,
    run_job,
)


def test_arms_take_turns(tmp_path: Path) -> None:
    jobs = jobs_in_turns(["verl_sync", "on_policy"], 2, tmp_path, stock_poll=True)
    assert [(job.arm, job.turn, job.poll_s) for job in jobs] == [
        ("verl_sync", 1, 0.02),
        ("on_policy", 1, 0.02),
        ("verl_sync", 2, 0.02),
        ("on_policy", 2, 0.02),
        ("verl_sync", 0, 2.0),
    ]
    assert len({job.directory for job in jobs}) == 5
    assert len(jobs_in_turns(["verl_sync", "on_policy"], 2, tmp_path, stock_poll=False)) == 4


def job_in(tmp_path: Path, arm: str) -> Job:
    return Job(arm, 1, 0.02, tmp_path)


def test_every_arm_gets_the_same_prompts_latencies_and_steps(tmp_path: Path) -> None:
    workload = load("agentic_wait")
    lines = {
        arm: set(overrides_of(job_in(tmp_path, arm), workload, 7)) for arm in ("verl_sync", "n_step_ahead")
    }
    for line in (
        "++data.seed=7",
        f"++trainer.total_training_steps={workload.total_steps}",
        "++actor_rollout_ref.rollout.n=4",
        "++reward.custom_reward_function.reward_kwargs={seed:7,wait:{median:0.3,sigma:0.6,cap:2.0}}",
    ):
        assert all(line in overrides for overrides in lines.values()), line
    assert "++async_strategy='n_step_ahead'" in lines["n_step_ahead"]
    assert not any(
        "async_pipeline" in line and "bench" not in line and "worker" not in line
        for line in lines["verl_sync"]
    )


def test_the_agent_loop_gets_the_episode(tmp_path: Path) -> None:
    workload = load("agentic_wait")
    overrides_of(job_in(tmp_path, "verl_sync"), workload, 7)
    agents: Any = OmegaConf.load(tmp_path / "agents.yaml")
    (agent,) = agents
    assert (agent.name, agent.seed) == ("bench_episode", 7)
    assert msgspec.convert(OmegaConf.to_container(agent.episode), EpisodeWorkload) == workload.episode


def test_an_arm_that_counts_prompts_gets_as_many_as_the_others(tmp_path: Path) -> None:
    workload = load("agentic_wait")
    lines = overrides_of(job_in(tmp_path, "verl_fully_async"), workload, 1)
    assert f"++rollout.total_rollout_steps={8 * workload.total_steps}" in lines
    assert "++rollout.n=4" in lines
    assert ARMS["verl_fully_async"].entry != ARMS["verl_sync"].entry


def test_no_arm_joins_an_existing_cluster(tmp_path: Path) -> None:
    for arm in ARMS:
        assert "++ray_kwargs.ray_init.address='local'" in overrides_of(
            job_in(tmp_path, arm), Workload(reason="r"), 1
        )


def test_each_turn_has_a_different_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def record_seed(job: object, workload: object, seed: int) -> list[str]:
        seeds.append(seed)
        return []

    monkeypatch.setattr(runner, "overrides_of", record_seed)
    fake_command(monkeypatch, "exit 1")
    for turn in (0, 1, 2):
        job = job_in(tmp_path / str(turn), "verl_sync")._replace(turn=turn)
        with pytest.raises(JobFailed):
            run_job(job, Workload(reason="r"), 7, tmp_path, lambda line: None)
    assert seeds == [7, 7, 8]


def test_a_job_gets_the_latency_of_its_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "seen"
    fake_command(monkeypatch, f'echo "$ASYNC_PIPELINE_BENCH_REFERENCE" > {seen}; exit 1')
    for reference_s, expected in (
        (
            LognormalWait(median=1, sigma=0.5, cap=2),
            {"seed": 7, "wait": {"median": 1, "sigma": 0.5, "cap": 2}},
        ),
        (None, None),
    ):
        workload = Workload(reason="r", reference_s=reference_s)
        with pytest.raises(JobFailed):
            run_job(
                job_in(tmp_path / str(expected is None), "on_policy"),
                workload,
                7,
                tmp_path,
                lambda line: None,
            )
        assert (json.loads(seen.read_text()) if seen.read_text().strip() else None) == expected


def fake_command(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(runner, "command_of", lambda entry, overrides: ["bash", "-c", script])


def run_once(folder: Path, say: Callable[[str], None] = lambda line: None) -> None:
    run_job(job_in(folder / "j", "verl_sync"), Workload(reason="r"), 1, folder, say)


def test_a_failed_job_has_the_error_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(monkeypatch, "echo '  3.1 s  ValueError: no such model'; exit 3")
    with pytest.raises(JobFailed, match=r"status 3: ValueError: no such model; see .*job\.log"):
        run_once(tmp_path)


def test_a_job_without_steps_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(monkeypatch, "true")
    with pytest.raises(JobFailed, match="0 of 12 optimizer steps ended"):
        run_once(tmp_path)


def test_a_job_that_hangs_is_terminated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(monkeypatch, "exec sleep 600")
    monkeypatch.setattr(runner, "START_LIMIT_S", 0.0)
    monkeypatch.setattr(runner, "EACH_LIMIT_S", 0.0)
    monkeypatch.setattr(job, "LOOK_S", 0.01)
    with pytest.raises(JobFailed, match="still running after 0 s"):
        run_once(tmp_path)


def test_progress_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(monkeypatch, "read -t 0.2 < <(tail -f /dev/null); exit 1")
    monkeypatch.setattr(runner, "PROGRESS_S", 0.0)
    monkeypatch.setattr(job, "LOOK_S", 0.01)
    lines: list[str] = []
    with pytest.raises(JobFailed):
        run_once(tmp_path, lines.append)
    assert "step 0 of 16" in lines[0]


def test_a_job_runs_under_watch_with_the_settings_of_a_cpu_run() -> None:
    command = command_of(ARMS["verl_sync"].entry, ["++a=1"])
    assert command[3].endswith("run_scripts/cpu_env.sh")
    assert Path(command[3]).is_file()
    assert "watch" in command
    assert "recipe.async_pipeline.lab.bench.jobs.job" in command
    assert command[-1] == "++a=1"
    on_gpus = command_of(ARMS["verl_sync"].entry, ["++a=1"], "cuda")
    assert on_gpus[0] == sys.executable and on_gpus == command[4:]


def test_a_workload_of_images_has_the_task_its_loop_and_its_judge(tmp_path: Path) -> None:
    lines = overrides_of(job_in(tmp_path, "one_step_off"), load("image"), 7)
    assert lines[0] == "+task=image", "before the overrides that change its values"
    assert (
        "++reward.custom_reward_function.path='pkg://recipe.async_pipeline.lab.bench.inputs.image_judge'"
        in lines
    )
    assert "++actor_rollout_ref.rollout.agent.default_agent_loop='diffusion'" in lines
    agents: Any = OmegaConf.load(tmp_path / "agents.yaml")
    assert OmegaConf.to_container(agents) == [{"name": "diffusion", "_target_": runner.IMAGE_LOOP}]
