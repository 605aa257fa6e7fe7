# SPDX-License-Identifier: Apache-2.0
"""The findings of `async-pipeline doctor` about this machine: devices, memory, limits and ports."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ....agents.processes import sandbox
from ....config.checks import machine
from .finding import Finding, Verdict

MIN_SHM_GB = 2.0
"""Two weight arenas and two buckets of the default sizes (2 x 512 + 2 x 128 MB), and Ray's object store."""
MIN_OPEN_FILES = 8192
"""Each process keeps a few sockets for each process that it talks to, and one for each open request."""
ATTENTION = "+actor_rollout_ref.model.override_config.attn_implementation"
RAY_PORTS = {6379: "Ray's head", 8265: "Ray's dashboard"}


def examine_machine() -> tuple[Finding, ...]:
    """Run all checks of this machine."""
    num_gpus = count_nvidia_devices()
    return (
        check_devices(num_gpus),
        check_flash_attention(num_gpus),
        *check_needs(machine.states()),
        check_sandbox(sandbox.reason_without()),
        *(check_port(port, user) for port, user in RAY_PORTS.items()),
    )


def check_needs(states: Iterable[machine.MachineState]) -> Iterator[Finding]:
    """Yield a row for what each run needs; of memory and files, also a warning if there is little."""
    for state in states:
        if state.remedy:
            verdict: Verdict = "fail" if state.fatal else "warn"
            yield Finding(subject=state.subject, verdict=verdict, detail=state.detail, remedy=state.remedy)
        elif state.subject == "shared memory":
            yield check_shared_memory(machine.SHM)
        elif state.subject == "open files":
            yield check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
        else:
            yield Finding(subject=state.subject, verdict="ok", detail=state.detail)


def count_nvidia_devices(devices: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA devices that this process can see."""
    return len([entry for entry in devices.glob("nvidia*") if entry.name.removeprefix("nvidia").isdigit()])


def check_devices(num_gpus: int) -> Finding:
    """Report the devices of this machine."""
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_gpus:
        return Finding(subject="devices", verdict="ok", detail=f"{num_gpus} GPUs, {num_cpus} CPU cores")
    detail = f"no GPU, {num_cpus} CPU cores: the small CPU runs only"
    if num_cpus < 2:
        return Finding(
            subject="devices", verdict="warn", detail=detail, remedy="use at least 2 cores for overlap"
        )
    return Finding(subject="devices", verdict="ok", detail=detail)


def check_flash_attention(
    num_gpus: int, version_of: Callable[[str], str] = importlib.metadata.version
) -> Finding:
    """Check that verl's default attention of FSDP is installed where there is a GPU."""
    if not num_gpus:
        return Finding(subject="flash-attn", verdict="ok", detail="not needed: it runs on GPUs only")
    try:
        return Finding(subject="flash-attn", verdict="ok", detail=f"flash-attn {version_of('flash-attn')}")
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            subject="flash-attn",
            verdict="warn",
            detail="not installed: FSDP trains with packed_sdpa; models of pictures and Ulysses need it",
            remedy=f"for these, build it for your torch, or set {ATTENTION}",
        )


def check_sandbox(reason: str) -> Finding:
    """Report whether commands of agents run in a sandbox (`agentic.sandbox`)."""
    if not reason:
        detail = "works: commands of agents see no other processes, and no files of the run"
        return Finding(subject="agents' sandbox", verdict="ok", detail=detail)
    return Finding(
        subject="agents' sandbox",
        verdict="warn",
        detail=f"none ({reason}): commands of agents can read the files and processes of the run",
        remedy="permit user namespaces and mounts in them (docs/agents.md), or run agents elsewhere",
    )


def check_open_files(soft: int, hard: int) -> Finding:
    """Check the limits on open files: sockets of requests, segments of weights, logs.

    `ray.init` raises the soft limit to the hard one, up to 65536; `ray start` does not.
    """
    detail = f"limit {_limit(soft)} (hard {_limit(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES:
        return Finding(subject="open files", verdict="ok", detail=detail)
    if hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES:
        remedy = f"run `ulimit -n {MIN_OPEN_FILES}` before `ray start`; a run without it raises the limit"
    else:
        remedy = f"raise the hard limit to {MIN_OPEN_FILES}: limits.conf, LimitNOFILE, or --ulimit nofile"
    return Finding(
        subject="open files", verdict="warn", detail=f"{detail}, below {MIN_OPEN_FILES}", remedy=remedy
    )


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def check_shared_memory(folder: Path) -> Finding:
    """Check that the weight arenas and Ray's object store fit."""
    if not folder.is_dir():
        return Finding(subject="shared memory", verdict="warn", detail=f"{folder} does not exist")

    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb >= MIN_SHM_GB:
        detail = f"{free_gb:.1f} GB free in {folder}, for two versions of the weights and Ray's object store"
        return Finding(subject="shared memory", verdict="ok", detail=detail)
    return Finding(
        subject="shared memory",
        verdict="warn",
        detail=f"{free_gb:.1f} GB free in {folder}, below {MIN_SHM_GB:g}",
        remedy="in a container, start it with a larger --shm-size; delete the leftovers of dead runs",
    )


def check_port(port: int, user: str) -> Finding:
    """Check that `port` of this machine is free for `user`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            remedy = "another Ray may be running: run `ray stop`, or ignore this if it is yours"
            detail = f"{port} ({user}) is in use: {error.strerror}"
            return Finding(subject="port", verdict="warn", detail=detail, remedy=remedy)
    return Finding(subject="port", verdict="ok", detail=f"{port} ({user}) is free")
