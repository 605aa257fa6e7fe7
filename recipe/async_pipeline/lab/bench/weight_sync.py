# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline bench weight-sync`: measure the cost of a weight update with real engines.

It compares this package's modes of loading with verl's checkpoint engine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ...console import echo
from ...errors import ConfigError
from ...weight_sync.memory.segment import create_segment
from .inputs.arms import ENGINES
from .measuring.machine import machine
from .results.outputs import add_logs_option, check_outputs, job_logs
from .results.weight_sync_table import STOCK, complete, table
from .runner import JobFailed
from .weight_sync_jobs import REQUESTS, WAYS, Engines, jobs_of, make_task, run_ways

LIMIT_BYTES = 256 << 20
"""Block size for the measurement of the machine's limits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline bench weight-sync`."""
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="rollout engine (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: one device for the trainer and --tensor-parallel for each replica; vLLM only, and not "
        "verified on a GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--params",
        default="100M",
        metavar="N",
        help="parameters of the model, e.g. 20M (default: %(default)s)",
    )
    parser.add_argument(
        "--replicas",
        default="2",
        metavar="A,B,...",
        help="rollout replicas, which generate throughout; one measurement for each number, e.g. 1,2,4 "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="devices of each replica; without accelerators, processes (default: %(default)s)",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=REQUESTS,
        metavar="N",
        help="requests that each replica always has in flight; with 0 the engines are idle, and no stall of "
        "verl's replicas can be measured (default: %(default)s)",
    )
    parser.add_argument(
        "--ways",
        metavar="A,B,...",
        help=f"ways to update weights: any of {', '.join(WAYS)} (default: all that the other options allow)",
    )
    parser.add_argument(
        "--versions",
        type=int,
        default=10,
        metavar="N",
        help="weight updates of each way to measure (default: %(default)s)",
    )
    parser.add_argument(
        "--hosts",
        type=int,
        choices=(1, 2),
        default=1,
        help="2: half of the replicas, rounded up, are on a second host, a Ray node of this machine with its "
        f"own network and shared memory; requires root, and excludes {STOCK} (default: %(default)s)",
    )
    parser.add_argument(
        "--delta",
        action="store_true",
        help="send versions to the second host as differences, in bfloat16, between steps of the size that "
        "Adam makes at a learning rate of 1e-6; requires --hosts 2",
    )
    parser.add_argument(
        "--json", type=Path, default=argparse.SUPPRESS, metavar="FILE", help="write all results to FILE"
    )
    add_logs_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run all ways with each number of replicas. Returns 0 if all completed, 1 if one failed."""
    numbers, ways = parse_replicas(args.replicas), parse_ways(args.ways, args.hosts)
    for option, least in (("versions", 1), ("tensor_parallel", 1), ("requests", 0)):
        if getattr(args, option) < least:
            name = option.replace("_", "-")
            raise ConfigError(f"--{name} must be >= {least}, got {getattr(args, option)}; choose another")
    if args.delta and args.hosts == 1:
        raise ConfigError("--delta needs --hosts 2: within one host, versions do not travel")
    if args.device == "cuda":
        require_devices(args, max(numbers) * args.tensor_parallel + 1)
    check_outputs(args.json, None, args.logs)
    parameters = parse_count(args.params)

    failed: dict[str, str] = {}
    rows: dict[str, Any] = {str(number): {} for number in numbers}
    data: dict[str, Any] = {
        "machine": machine(),
        "command": "async-pipeline " + " ".join(sys.argv[1:]),
        "engine": args.engine,
        "device": args.device,
        "params": parameters,
        "tensor_parallel": args.tensor_parallel,
        "requests": args.requests,
        "versions": args.versions,
        "hosts": args.hosts,
        "delta": args.delta,
        "limits": limits(),
        "replicas": rows,
        "failed": failed,
    }

    with job_logs(args.logs, failed) as root:
        task = make_task(parameters, root / "task", args.tensor_parallel)
        jobs = [(number, job) for number in numbers for job in jobs_of(ways)]
        for turn, (number, job) in enumerate(jobs, start=1):
            directory = root / f"{'+'.join(job)}-{number}"
            echo(f"[{turn}/{len(jobs)}] {', '.join(job)}, {number} replicas; log in {directory}")
            engines = Engines(
                number, args.tensor_parallel, args.requests, args.hosts, args.delta, args.engine, args.device
            )
            try:
                rows[str(number)] |= run_ways(job, directory, task, engines, args.versions, echo)
            except JobFailed as error:
                echo(f"  failed: {error}")
                failed |= {f"{way}-{number}": str(error) for way in job}
            complete(data)
            if args.json:
                args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    echo("\n" + table(data))
    return 1 if failed else 0


def require_devices(args: argparse.Namespace, devices: int) -> None:
    """Raises ConfigError if the options cannot be combined with CUDA devices, or if there are too few."""
    if args.engine != ENGINES[0] or args.hosts > 1:
        raise ConfigError(
            f"--device cuda is implemented for --engine {ENGINES[0]} on one host, got --engine {args.engine} "
            f"--hosts {args.hosts}; leave the others out"
        )
    if torch.cuda.device_count() < devices:
        raise ConfigError(
            f"--device cuda needs {devices} devices, one for the trainer and the replicas', but torch finds "
            f"{torch.cuda.device_count()}; use fewer replicas, or --device cpu"
        )


def parse_replicas(text: str) -> list[int]:
    """Parse numbers such as `1,2,4`. Raises ConfigError if they are not different counts."""
    numbers = [int(part) for part in text.split(",") if part.isdecimal()]
    if len(numbers) != text.count(",") + 1 or min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise ConfigError(f"--replicas must be different numbers >= 1 such as 1,2,4, got {text!r}")
    return numbers


def parse_ways(text: str | None, hosts: int = 1) -> list[str]:
    """Parse names of ways; None means all that run on this number of hosts.

    Raises ConfigError if one is unknown, repeated, or does not run on two hosts.
    """
    possible = [name for name in WAYS if hosts == 1 or name != STOCK]
    ways = possible if text is None else text.split(",")
    if not set(ways) <= set(possible) or len(set(ways)) < len(ways):
        where = " on two hosts" if hosts > 1 else ""
        raise ConfigError(f"--ways must be different names of {', '.join(possible)}{where}, got {text!r}")
    return ways


def parse_count(text: str) -> int:
    """Parse a count such as `100M`. Raises ConfigError if it is not a positive count."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.upper())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--params must be a count such as 100M, got {text!r}")
    return round(float(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[match[2]])


def limits() -> dict[str, float]:
    """Return GB/s of one thread: a copy between two warm blocks, and a copy into warm shared memory."""
    source, target = torch.ones(LIMIT_BYTES, dtype=torch.uint8), torch.empty(LIMIT_BYTES, dtype=torch.uint8)
    segment = create_segment(LIMIT_BYTES)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {"memcpy_gb_s": _rate(target, source), "shm_gb_s": _rate(segment.bytes, source)}
    finally:
        torch.set_num_threads(threads)
        segment.close()


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return LIMIT_BYTES / median(seconds[1:]) / 1e9
