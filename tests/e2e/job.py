# SPDX-License-Identifier: Apache-2.0
"""Runs whole training jobs as a user would, through `async-pipeline watch`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from recipe.async_pipeline.config.derived.sample_store import store_budget
from recipe.async_pipeline.config.knobs.schema import AsyncPipelineConfig
from recipe.async_pipeline.config.paths import OWN, select
from recipe.async_pipeline.core.graph import GRAPH, OPTIONAL
from recipe.async_pipeline.core.state_machine import StageState
from recipe.async_pipeline.lab.event_audit import audit_events
from recipe.async_pipeline.lab.job import processes_with
from recipe.async_pipeline.weight_sync.memory.segment_names import PREFIX
from tests import OUTPUT

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = float(os.environ.get("ASYNC_PIPELINE_TEST_LIMIT_S", "1500"))
"""No job of these tests takes longer on two idle cores, start-up included; a job that does is a hang."""
STRAGGLES_S = 40.0
"""How long an answer takes that is meant to hold a step up."""
UPDATE_S = 8.0
"""Of an optimizer step that is meant to take ten times as long as generation."""
LOOK = ("+task=look", "trainer.val_before_train=False", "trainer.test_freq=-1")
"""Overrides of a job with pictures, without validations."""
FEW = 4
"""Groups of a step, and responses of a group, of a job with the pretrained model."""
WORDS = (
    "+task=words",
    f"data.train_batch_size={FEW}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={FEW}",
    f"actor_rollout_ref.rollout.n={FEW}",
    # verl's own trainer splits the batch into whole micro-batches.
    f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={FEW * FEW}",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
)
"""Overrides of a job with the pretrained model, without validations."""
MARK = "ASYNC_PIPELINE_TEST_JOB"
"""Every process of a job inherits this variable; other jobs on the machine are none of our business."""


def smoke_command(*overrides: str, pipeline: bool = True) -> list[str]:
    """verl's entry point with the smoke configuration."""
    # An error of an observer must fail the test.
    strict = "trainer.v1.async_pipeline.faults.strict_observers=True"
    switch = ["+async_pipeline=True", strict] if pipeline else []
    config = ["--config-path", str(ROOT / "configs"), "--config-name", "smoke_cpu"]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *config, *switch, *overrides]


Action = Callable[[subprocess.Popen[str]], None]
"""Something done to a running job."""


@dataclass
class Job:
    """A finished job."""

    status: int
    output: str
    run_dir: Path
    ended_after_event_s: float | None = None
    """Seconds between the last event and the end."""
    pids: set[int] = field(default_factory=set)

    @property
    def summary(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return loaded

    def events(self) -> Iterator[dict[str, Any]]:
        with (self.run_dir / "events.jsonl").open() as lines:
            yield from map(json.loads, lines)

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]


class Event(NamedTuple):
    """Something done to a job when its output holds `text`."""

    text: str
    do: Action = lambda process: None


def run_job(
    command: Sequence[str],
    run_dir: Path,
    task: Path,
    *,
    events: Sequence[Event] = (),
    prefix: Sequence[str] = (),
    python: Path = Path(sys.executable),
    cwd: Path = ROOT,
) -> Job:
    """Run to the end; the events happen one after the other, each at the first line of output that it waits
    for. `prefix` is a command that runs others, `python` the interpreter of `watch`.

    Raises TimeoutError: the job did not end, with what it printed.
    """
    environment = {
        **os.environ,
        MARK: str(run_dir),
        "ASYNC_PIPELINE_TASK": str(task),
        "ASYNC_PIPELINE_RUN": run_dir.name,
        # Where a stock run puts its metrics; async_pipeline writes to the run directory.
        "VERL_FILE_LOGGER_ROOT": str(run_dir.parent),
    }
    watch = [*prefix, str(python), "-m", "recipe.async_pipeline", "watch", "--", *command]
    lines: list[str] = []
    waiting = list(events)
    fired: float | None = None
    started = time.monotonic()
    with (
        subprocess.Popen(
            watch, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
        open(os.environ.get(OUTPUT, os.devnull), "w", buffering=1, encoding="utf-8") as shown,
    ):
        timer = threading.Timer(LIMIT_S, process.send_signal, (signal.SIGTERM,))
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            shown.write(line)
            if waiting and waiting[0].text in line:
                fired = time.monotonic()
                waiting.pop(0).do(process)
        status = process.wait()
        timer.cancel()
    ended = time.monotonic()
    if ended - started > LIMIT_S:
        raise TimeoutError(f"the job did not end within {LIMIT_S:g} s:\n{''.join(lines)[-3000:]}")
    after = None if fired is None or waiting else ended - fired
    return Job(status, "".join(lines), run_dir, after)


def check_clean_end(
    job: Job, strategy: str, max_lag: int, steps: int, *, groups: int = 16, responses: int = 8
) -> dict[str, Any]:
    """The run has trained each step, of so many groups of so many responses, and accounts for all of them."""
    assert job.status == 0, job.output[-3000:]
    summary = job.summary
    assert summary["status"] == "completed"
    assert (summary["strategy"], summary["max_lag"], summary["steps"]) == (strategy, max_lag, steps)
    assert summary["lag_max"] <= max_lag
    assert summary["served_version"] == summary["trainer_version"] == steps
    assert summary["groups_trained"] == steps * groups
    fates = sum(summary[f"groups_{fate}"] for fate in ("trained", "filtered", "expired", "failed"))
    assert (summary["groups_drawn"], summary["groups_in_flight"]) == (fates, 0)
    assert summary["samples_trained"] == steps * groups * responses
    assert summary["tensors_proved"] > 0
    assert summary["publications"] == steps + 1
    config = json.loads((job.run_dir / "config.json").read_text())
    budget = store_budget(config, AsyncPipelineConfig.of(select(config, OWN)))
    stored = [row["data"].get("async_pipeline/sample_store/rows", 0.0) for row in job.metrics()]
    assert 0 < max(stored) <= budget.rows
    return summary


def check_events(job: Job, *optional: str) -> None:
    """No event breaks a rule, and each role ended well. `optional`: roles of `core.graph.OPTIONAL` that the
    run has besides `logp`, which its settings tell.
    """
    audit = audit_events(job.events())
    assert audit.violations == []
    settings = json.loads((job.run_dir / "settings.json").read_text())
    passed = () if settings["training.old_logp"] == "update" else ("logp",)
    roles = (GRAPH.keys() - set(OPTIONAL)) | {*optional, *passed}
    assert {role for role, _ in audit.state.lanes} == roles
    assert set(audit.state.lanes.values()) == {StageState.DONE.name}


def check_reference_returned(job: Job) -> None:
    """Its workers have died once and computed again, and the run has left no copy of it on disk."""
    again = [(event["event"], event["replica"]) for event in job.events() if "replica" in event]
    assert [one for one in again if one[1] == "ref_logp"] == [
        ("FENCED", "ref_logp"),
        ("REJOINED", "ref_logp"),
    ]
    assert not (job.run_dir / "reference").exists()


def processes_of(run_dir: Path) -> list[str]:
    """Pids and command lines of the processes of a job that are alive."""
    return [f"{found.pid}: {found.command[:120]}" for found in processes_with(MARK, str(run_dir))]


def pids_named(part: str, run_dir: Path) -> list[int]:
    """Return the pids of the processes of a job whose command line contains `part`."""
    lines = [line.partition(": ") for line in processes_of(run_dir)]
    return [int(pid) for pid, _, command in lines if part in command]


def kill_all(part: str, run_dir: Path) -> Action:
    """Return the SIGKILL of every process of a job whose command line contains `part`; there is one."""

    def kill(process: subprocess.Popen[str]) -> None:
        found = pids_named(part, run_dir)
        assert found, f"no process of the job is called {part}"
        for pid in found:
            os.kill(pid, signal.SIGKILL)

    return kill


def kill_reference(run_dir: Path) -> Action:
    """Return the SIGKILL of the one worker of a pool for `ref_logp`.

    The training worker may have the same name, but only that one owns memory of versions.
    """

    def kill(process: subprocess.Popen[str]) -> None:
        workers = [
            pid for name in ("WorkerDict", "PipelineWorker") for pid in pids_named(f"ray::{name}", run_dir)
        ]
        (reference,) = [
            pid
            for pid in workers
            if not re.search(rf"{PREFIX}\w+-{pid}-", Path(f"/proc/{pid}/maps").read_text())
        ]
        os.kill(reference, signal.SIGKILL)

    return kill


def signal_one_of_two(part: str, run_dir: Path, sent: signal.Signals) -> Action:
    """Return the signal to the first of the two processes of a job whose command line contains `part`."""

    def send(process: subprocess.Popen[str]) -> None:
        found = pids_named(part, run_dir)
        assert len(found) == 2
        os.kill(found[0], sent)

    return send


def interrupt(process: subprocess.Popen[str]) -> None:
    """Press Ctrl-C."""
    process.send_signal(signal.SIGINT)
