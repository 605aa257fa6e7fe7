# SPDX-License-Identifier: Apache-2.0
"""Run arms as jobs, in turns. A failed job is reported with its last error, and the others continue."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..job import JobProcess, last_error, under_watch, with_cpu_settings
from .inputs.arms import ARMS, ENGINES, hydra_overrides
from .inputs.workload import CONFIGS, DEFAULT_RESPONSES, Workload
from .measuring.measure import Measured, NotEnoughSteps, measure
from .measuring.spans import POLL_S, REFERENCE, SPANS_DIR, read_spans
from .measuring.usage import EVERY_S, PARTS, Usage, UsageMeter

FAST_POLL_S, STOCK_POLL_S = 0.02, 2.0
"""Interval at which verl's replay buffer polls for finished responses: in a comparison, and as shipped."""
START_LIMIT_S, EACH_LIMIT_S = 900.0, 60.0
"""Time limits of a job: for its start, and for each step or weight update that it counts."""
AGENT_LOOPS: Mapping[str | None, str] = {
    None: "recipe.async_pipeline.lab.bench.jobs.agent_loop.EpisodeLoop",
    "frozen_lake": "recipe.async_pipeline.lab.bench.jobs.lake_loop.LakeLoop",
}
"""The agent loop of each environment of a workload."""
IMAGE_LOOP = "recipe.async_pipeline.lab.bench.jobs.image_loop.ImageLoop"
LOG = "job.log"
PROGRESS_S = 30.0


class Job(NamedTuple):
    """One arm in one turn."""

    arm: str
    turn: int
    poll_s: float
    directory: Path
    engine: str = ENGINES[0]


class JobFailed(RuntimeError):
    """A job ended with an error, or before its measured steps."""


def jobs_in_turns(
    arms: Sequence[str], repeats: int, root: Path, *, stock_poll: bool, engine: str = ENGINES[0]
) -> list[Job]:
    """Return the jobs in turns (A B C A B C).

    With `stock_poll`, each trainer of verl runs one additional job with its polling interval as shipped.
    """
    turns = [
        Job(arm, turn, FAST_POLL_S, root / f"{turn}-{arm}", engine)
        for turn in range(1, repeats + 1)
        for arm in arms
    ]
    if stock_poll:
        turns += [
            Job(arm, 0, STOCK_POLL_S, root / f"stock-poll-{arm}", engine)
            for arm in arms
            if not ARMS[arm].uses_pipeline
        ]
    return turns


def overrides_of(job: Job, workload: Workload, seed: int) -> list[str]:
    """Return the overrides of a job for verl's entry point, and write the file of its agent loop."""
    agents = job.directory / "agents.yaml"
    loop: dict[str, Any] = {
        "name": "bench_episode",
        "_target_": AGENT_LOOPS[workload.episode.environment],
        "episode": msgspec.to_builtins(workload.episode),
        "seed": seed,
    }
    if workload.task == "image":
        # In place of the loop that such a policy always has.
        loop = {"name": "diffusion", "_target_": IMAGE_LOOP}
    # JSON is YAML.
    agents.write_text(json.dumps([loop]))

    arm = ARMS[job.arm]
    values: dict[str, Any] = {
        "data.seed": seed,
        "trainer.total_training_steps": workload.total_steps,
        "trainer.experiment_name": job.directory.name,
        "trainer.default_local_dir": str(job.directory / "checkpoints"),
        "actor_rollout_ref.rollout.agent.default_agent_loop": loop["name"],
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(agents),
        # Do not join another Ray cluster on this machine.
        "ray_kwargs.ray_init.address": "local",
        **workload.overrides,
        **arm.with_engine(job.engine),
    }

    if "async_training" in arm.overrides:
        # This trainer counts prompts instead of steps.
        values["rollout.total_rollout_steps"] = workload.prompts_per_step * workload.total_steps
        values["rollout.n"] = values.get("actor_rollout_ref.rollout.n", DEFAULT_RESPONSES)
    if arm.uses_pipeline:
        values["trainer.v1.async_pipeline.run_dir"] = str(job.directory / "run")
    if workload.judge_s is not None:
        judge = "judge" if workload.task is None else f"{workload.task}_judge"
        values["reward.custom_reward_function.path"] = f"pkg://recipe.async_pipeline.lab.bench.inputs.{judge}"
        values["reward.custom_reward_function.reward_kwargs"] = {
            "seed": seed,
            "wait": msgspec.to_builtins(workload.judge_s),
        }
    task = [] if workload.task is None else [f"+task={workload.task}"]
    return [*task, *hydra_overrides(values)]


def command_of(entry: str, overrides: Sequence[str], device: str = "cpu") -> list[str]:
    """Return the command of a job: a module under `watch`, which ends all processes.

    On `cpu` it has the settings of a machine without accelerator.
    """
    config = ["--config-path", str(CONFIGS), "--config-name", "smoke_cpu"]
    command = under_watch("-m", entry, *config, *overrides)
    return with_cpu_settings(command) if device == "cpu" else command


def _reference(workload: Workload, seed: int) -> str:
    if workload.reference_s is None:
        return ""
    return json.dumps({"seed": seed, "wait": msgspec.to_builtins(workload.reference_s)})


def run_job(job: Job, workload: Workload, seed: int, task: Path, say: Callable[[str], None]) -> Measured:
    """Run one arm once. Raises JobFailed if it fails, hangs, or ends before its measured steps."""
    job.directory.mkdir(parents=True)
    started, load_before = time.monotonic(), os.getloadavg()[0]
    usage = run_watched(
        job.directory,
        # Each turn has different prompts and latencies, which are the same for all arms.
        command_of(ARMS[job.arm].entry, overrides_of(job, workload, seed + max(job.turn, 1) - 1)),
        {"ASYNC_PIPELINE_TASK": str(task), POLL_S: str(job.poll_s), REFERENCE: _reference(workload, seed)},
        counting=("update_actor", workload.total_steps, "step"),
        say=say,
    )
    try:
        return measure(read_spans(job.directory), usage, workload, started=started, load_before=load_before)
    except NotEnoughSteps as error:
        raise failure(job.directory, str(error)) from None


def run_watched(
    directory: Path,
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    counting: tuple[str, int, str],
    say: Callable[[str], None],
    parts: Mapping[str, str] = PARTS,
    every_s: float = EVERY_S,
) -> list[Usage]:
    """Run a command to its end, with its output in `job.log` and its spans in files of `directory`.

    `counting` is the name of the spans to count for lines of progress, their expected number, and the word
    for one of them. `parts` and `every_s`: see `UsageMeter`. Returns the resource usage of the processes.
    Raises JobFailed if the job fails or hangs.
    """
    settings = {
        SPANS_DIR: str(directory),
        "ASYNC_PIPELINE_RUN": directory.name,
        "OMP_NUM_THREADS": "1",
        # verl's file logger writes here; the pipeline's metrics go to the run directory.
        "VERL_FILE_LOGGER_ROOT": str(directory),
        **environment,
    }
    name, expected, unit = counting
    reported_s = 0.0

    def report(passed_s: float) -> None:
        nonlocal reported_s
        if passed_s - reported_s >= PROGRESS_S:
            reported_s = passed_s
            done = sum(span.name == name for span in read_spans(directory))
            say(f"  ... {passed_s:.0f} s, {unit} {done} of {expected}")

    process = JobProcess(command, directory / LOG, settings)
    meter = UsageMeter(process.pid, parts, every_s)
    try:
        status = process.wait(START_LIMIT_S + EACH_LIMIT_S * expected, report)
    except TimeoutError as error:
        raise JobFailed(str(error)) from None
    finally:
        process.stop()
        usage = meter.stop()

    if status:
        raise failure(directory, f"status {status}")
    return usage


def failure(directory: Path, why: str) -> JobFailed:
    """Return the error of a failed job, with the last error in its log."""
    log = directory / LOG
    return JobFailed(f"{why}: {last_error(log.read_text(encoding='utf-8', errors='replace'))}; see {log}")
