# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline bench arena`: measure how fast weights move from a device to host memory and back.

It needs torch alone, without engine or trainer. Tensors on one device are gathered into the arena, copied
from there to a standby copy on the device, and committed. Each rate is compared with a plain copy between
the device and pinned memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ...console import echo
from ...errors import ConfigError
from ...weight_sync.engine.copy_plan import Recorder
from ...weight_sync.engine.standby import StandbyCopy
from ...weight_sync.memory.arena import ArenaReader, ArenaWriter, HeldBlock
from ...weight_sync.memory.board import await_manifest
from ...weight_sync.memory.manifest import Manifest
from ..tables import render_spread, render_table, spread
from .measuring.machine import machine
from .results.outputs import check_outputs

TENSOR_BYTES = 128 << 20
"""About the size of one matrix of a large model."""
BUCKET_BYTES = 512 << 20
LIMIT_BYTES = 1 << 30
TIMEOUT_S = 600.0
SMALLEST_GIB, LARGEST_GIB = 0.001, 1024.0
WARMUP = 2
"""Versions to skip: they allocate, touch and pin the two arenas."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline bench arena`."""
    parser.add_argument(
        "--sizes",
        default="1,4,16",
        metavar="A,B,...",
        help="GiB of weights (default: %(default)s); the device needs three times that",
    )
    parser.add_argument(
        "--versions",
        type=int,
        default=5,
        metavar="N",
        help="weight updates to measure of each size (default: %(default)s)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument(
        "--json", type=Path, default=argparse.SUPPRESS, metavar="FILE", help="write all results to FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Measure all sizes. Raises ConfigError if an option is invalid or there is no such device."""
    try:
        sizes = [float(size) for size in args.sizes.split(",")]
    except ValueError:
        raise ConfigError(f"--sizes must be numbers of GiB such as 1,4,16, got {args.sizes!r}") from None
    # NaN is neither.
    if not all(SMALLEST_GIB <= size <= LARGEST_GIB for size in sizes) or args.versions < 1:
        raise ConfigError(
            f"--sizes must be {SMALLEST_GIB:g} to {LARGEST_GIB:g} GiB and --versions >= 1, "
            f"got {args.sizes} and {args.versions}"
        )
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda needs a CUDA device, but torch finds none; try `--device cpu --sizes 0.1`"
        )
    check_outputs(args.json, None, None)

    device = torch.device(args.device)
    data: dict[str, Any] = {
        "machine": machine(),
        "device": _name(device),
        "limits": limits(device),
        "sizes": {},
    }

    for size in sizes:
        data["sizes"][f"{size:g}"] = found = measure(int(size * 2**30), device, args.versions)
        echo(f"{size:g} GiB: " + ", ".join(f"{name} {value['median']:.4g}" for name, value in found.items()))
        if args.json:
            args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    echo("\n" + table(data))
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run it without `async-pipeline bench`, which imports what the other measurements need."""
    parser = argparse.ArgumentParser(prog="bench.arena")
    add_arguments(parser)
    parser.set_defaults(json=None)
    return run(parser.parse_args(arguments))


def measure(num_bytes: int, device: torch.device, versions: int) -> dict[str, Any]:
    """Return GB/s of gather and stage and seconds of a commit, each as median, min and max."""
    tensor_bytes = min(TENSOR_BYTES, num_bytes)
    shapes = [(tensor_bytes // 2,)] * (num_bytes // tensor_bytes)
    trained = [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    served = [torch.nn.Parameter(torch.empty_like(t), requires_grad=False) for t in trained]
    parts = [HeldBlock(f"w{i}", tuple(t.shape), t.dtype, (0,), t) for i, t in enumerate(trained)]
    writer, reader = ArenaWriter(BUCKET_BYTES, 4, None), ArenaReader()
    taken: dict[str, list[float]] = {"gather": [], "stage": [], "commit": []}

    spare: StandbyCopy | None = None
    try:
        for version in range(WARMUP + versions):
            trained[0].add_(1)
            ticket = writer.gather_parts(version, parts)
            assert ticket is not None
            manifest = await_manifest(ticket, TIMEOUT_S)

            published = reader.tensors(manifest)
            if device.type == "cuda":
                reader.pinning(manifest, published.values())()
            if spare is None:
                with Recorder(published) as recorder:
                    for parameter, tensor in zip(served, published.values(), strict=True):
                        parameter.data.copy_(tensor)
                load = recorder.recorded(manifest, published)
                assert load is not None, recorder.other
                spare = StandbyCopy(load, served, may_exchange=False)

            stage_s = _seconds(device, partial(_fill, spare, manifest, published))
            assert spare.version() == version
            commit_s = _seconds(device, spare.commit)
            if version >= WARMUP:
                taken["gather"].append(ticket.gather_s)
                taken["stage"].append(stage_s)
                taken["commit"].append(commit_s)
        assert all(torch.equal(a, b) for a, b in zip(served, trained, strict=True)), (
            "the last version is served"
        )
    finally:
        writer.close()

    total = sum(t.nbytes for t in trained)
    rates = {
        f"{name}_gb_s": spread([total / s / 1e9 for s in taken[name]])._asdict()
        for name in ("gather", "stage")
    }
    return rates | {"commit_s": spread(taken["commit"])._asdict()}


def _fill(spare: StandbyCopy, manifest: Manifest, published: dict[str, torch.Tensor]) -> None:
    spare.begin(manifest, published)
    spare.join()


def limits(device: torch.device) -> dict[str, float]:
    """Return GB/s between the device and one block of pinned memory, and within the device."""
    pinned = torch.empty(LIMIT_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    here, there = (torch.ones(LIMIT_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    copies: dict[str, Callable[[], Any]] = {
        "to_host_gb_s": lambda: pinned.copy_(here, non_blocking=True),
        "to_device_gb_s": lambda: here.copy_(pinned, non_blocking=True),
        "within_device_gb_s": lambda: there.copy_(here),
    }
    return {
        name: LIMIT_BYTES / median(_seconds(device, copy) for _ in range(5)) / 1e9
        for name, copy in copies.items()
    }


def table(data: dict[str, Any]) -> str:
    """Return a Markdown table of medians [min .. max] and their shares of the link's limit."""
    limit = data["limits"]
    rates = ", ".join(f"{name.removesuffix('_gb_s')} {rate:.1f}" for name, rate in limit.items())
    rows = [
        [
            size,
            render_spread(row["gather_gb_s"], ".1f"),
            f"{row['gather_gb_s']['median'] / limit['to_host_gb_s']:.0%}",
            render_spread(row["stage_gb_s"], ".1f"),
            f"{row['stage_gb_s']['median'] / limit['to_device_gb_s']:.0%}",
            render_spread(row["commit_s"], ".1f", 1e3),
        ]
        for size, row in data["sizes"].items()
    ]
    header = ["GiB", "gather, GB/s", "of limit", "stage, GB/s", "of limit", "commit, ms"]
    return f"{data['device']}; limits, GB/s: {rates}\n\n{render_table(header, rows)}"


def _seconds(device: torch.device, work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
