# SPDX-License-Identifier: Apache-2.0
"""Sample CPU time and memory of a job and all its descendants while it runs."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil

EVERY_S = 1.0
PARTS = {"VLLM::": "generate", "sglang::": "generate", "WorkerDict": "train"}
"""Words in a command line to the part of a job; all other processes, such as HTTP servers, are `other`."""


class Usage(NamedTuple):
    """One sample: CPU seconds since the start by part, and private bytes of all processes."""

    at: float
    cpu_s: dict[str, float]
    private_bytes: int
    machine_s: float = 0.0
    """CPU seconds of all processes of the machine."""


def part_of(command_line: str, parts: Mapping[str, str] = PARTS) -> str:
    """Return the part of the job that a process belongs to."""
    return next((part for word, part in parts.items() if word in command_line), "other")


def cpu_between(samples: Sequence[Usage], start: float, end: float) -> dict[str, float]:
    """Return the CPU seconds by part between `start` and `end`, interpolated between samples."""
    parts = {part for sample in samples for part in sample.cpu_s}
    return {part: _at(samples, part, end) - _at(samples, part, start) for part in sorted(parts)}


def foreign_cpu(samples: Sequence[Usage]) -> float:
    """Return the mean number of cores that processes outside of this job kept busy while it ran."""
    if len(samples) < 2:
        return 0.0
    first, last = samples[0], samples[-1]
    own = sum(last.cpu_s.values()) - sum(first.cpu_s.values())
    return max(0.0, last.machine_s - first.machine_s - own) / (last.at - first.at)


def _at(samples: Sequence[Usage], part: str, when: float) -> float:
    index = bisect_left([sample.at for sample in samples], when)
    if index == 0 or index == len(samples):
        nearest = samples[min(index, len(samples) - 1)]
        return nearest.cpu_s.get(part, 0.0)
    before, after = samples[index - 1], samples[index]
    share = (when - before.at) / (after.at - before.at)
    low, high = before.cpu_s.get(part, 0.0), after.cpu_s.get(part, 0.0)
    return low + share * (high - low)


class UsageMeter:
    """Samples a process tree in a thread until `stop`."""

    def __init__(self, pid: int, parts: Mapping[str, str] = PARTS, every_s: float = EVERY_S) -> None:
        self.samples: list[Usage] = []
        self._parts, self._every_s = parts, every_s
        self._root = psutil.Process(pid)
        self._seen: dict[tuple[int, float], float] = {}
        """CPU seconds of each process at the last sample."""
        self._cpu_s: defaultdict[str, float] = defaultdict(float)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_ended, name="usage", daemon=True)
        self._thread.start()

    def stop(self) -> list[Usage]:
        """End the thread. Returns all samples, oldest first."""
        self._ended.set()
        self._thread.join()
        return self.samples

    def _sample_until_ended(self) -> None:
        while not self._ended.wait(self._every_s):
            self.samples.append(self.sample())

    def sample(self) -> Usage:
        """Take one sample. Processes that have ended count with their last known CPU time.

        Time counts for the part that a process belongs to when it is spent: Ray renames a worker when an
        actor starts in it, and a process that ends loses its name.
        """
        private = 0
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            processes = []

        for process in processes:
            try:
                with process.oneshot():
                    spent = process.cpu_times()
                    memory = process.memory_info()
                    part = part_of(" ".join(process.cmdline()), self._parts)
                    key, seconds = (process.pid, process.create_time()), spent.user + spent.system
                    self._cpu_s[part] += seconds - self._seen.get(key, 0.0)
                    self._seen[key] = seconds
                    private += memory.rss - memory.shared
            except psutil.Error:
                continue

        busy = psutil.cpu_times()
        machine = sum(busy) - busy.idle - getattr(busy, "iowait", 0.0) - getattr(busy, "guest", 0.0)
        return Usage(time.monotonic(), dict(self._cpu_s), private, machine)
