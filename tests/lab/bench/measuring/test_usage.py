# SPDX-License-Identifier: Apache-2.0
"""CPU time and memory of trees of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import psutil
import pytest

from recipe.async_pipeline.lab.bench.measuring.usage import (
    Usage,
    UsageMeter,
    cpu_between,
    foreign_cpu,
    part_of,
)


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("ray::WorkerDict.actor_update_actor", "train"),
        ("VLLM::EngineCore", "generate"),
        ("VLLM::Worker_TP1", "generate"),
        ("sglang::scheduler", "generate"),
        ("ray::PipelineVLLMServer.generate", "other"),
        ("ray::vLLMHttpServer.generate", "other"),
        ("ray::AgentLoopWorkerTQ", "other"),
        ("", "other"),
    ],
)
def test_a_process_belongs_to_a_part(command: str, part: str) -> None:
    assert part_of(command) == part


def test_another_table_of_parts_can_be_given() -> None:
    parts = {"AgentLoopWorker": "workers"}
    assert part_of("ray::PushAgentLoopWorker.run_group", parts) == "workers"
    assert part_of("VLLM::EngineCore", parts) == "other"


def test_time_between_samples_is_interpolated() -> None:
    samples = [
        Usage(0.0, {"train": 0.0}, 0),
        Usage(10.0, {"train": 5.0, "other": 2.0}, 0),
        Usage(20.0, {"train": 25.0, "other": 2.0}, 0),
    ]
    assert cpu_between(samples, 5.0, 15.0) == {"other": pytest.approx(1.0), "train": pytest.approx(12.5)}
    assert cpu_between(samples, -5.0, 99.0) == {"other": 2.0, "train": 25.0}


def test_foreign_cpu_excludes_this_job() -> None:
    samples = [
        Usage(0.0, {"train": 1.0}, 0, 100.0),
        Usage(5.0, {}, 0, 0.0),
        Usage(10.0, {"train": 4.0, "other": 2.0}, 0, 110.0),
    ]
    assert foreign_cpu(samples) == pytest.approx((10.0 - 5.0) / 10)
    assert foreign_cpu(samples[:1]) == 0.0


class NamedProcess:
    """A process of which psutil says what the test says."""

    pid = 1
    name, cpu_s = "", 0.0

    def children(self, recursive: bool) -> list[NamedProcess]:
        return []

    def oneshot(self) -> nullcontext[None]:
        return nullcontext()

    def cpu_times(self) -> SimpleNamespace:
        return SimpleNamespace(user=self.cpu_s, system=0.0)

    def memory_info(self) -> SimpleNamespace:
        return SimpleNamespace(rss=0, shared=0)

    def cmdline(self) -> list[str]:
        return [self.name]

    def create_time(self) -> float:
        return 1.0


def test_time_counts_for_the_part_of_a_process_at_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of Ray is renamed when an actor starts in it, and a process that ends has no name."""
    process = NamedProcess()
    monkeypatch.setattr(psutil, "Process", lambda pid: process)
    meter = UsageMeter(1, every_s=1000.0)
    found = []
    for process.name, process.cpu_s in (("ray::IDLE", 2.0), ("ray::WorkerDict", 5.0), ("", 5.5)):
        found.append(meter.sample().cpu_s)
    meter.stop()
    assert found == [{"other": 2.0}, {"other": 2.0, "train": 3.0}, {"other": 2.5, "train": 3.0}]


def test_cpu_time_of_ended_processes_is_kept() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('burnt', flush=True)\ninput()"
    code = (
        f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {burn!r}, 'WorkerDict']))"
    )

    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        meter = UsageMeter(process.pid)
        assert process.stdout is not None
        process.stdout.readline()
        alive = meter.sample()
        process.communicate(b"\n")
        gone = meter.sample()

    assert alive.cpu_s["train"] >= 0.29
    assert gone.cpu_s["train"] >= alive.cpu_s["train"]
    assert alive.private_bytes > 2**20
    assert gone.machine_s > alive.cpu_s["train"]
    assert meter.stop() is meter.samples


def test_sampling_is_cheap() -> None:
    meter = UsageMeter(os.getpid())
    started = time.process_time()
    meter.sample()
    assert time.process_time() - started < 1.0
    meter.stop()
