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
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from ..console import echo
from ..errors import ConfigError
from ..toy.build import ToySpec, ensure_toy
from ..weight_sync.segment import create_segment
from .arms import ARMS, hydra_overrides
from .outputs import add_logs_option, check_outputs, job_logs
from .report import machine
from .runner import JobFailed, command_of, run_watched
from .spans import read_spans
from .stalls import LIMITS, PUBLICATION, costs, summary

ENTRY = "recipe.async_pipeline.verl_bridge.bench.weight_sync_job"
TIMED = "recipe.async_pipeline.verl_bridge.bench.weight_sync_worker.TimedWorkerExtension"


class Way(NamedTuple):
    """A way to update weights: an arm, and additional settings."""

    arm: str
    overrides: Mapping[str, Any] = {}


WAYS = {
    # `stage: device` hides everything but an exchange behind generation, at the cost of a standby copy.
    "dual_buffer": Way("one_step_off", {"trainer.v1.async_pipeline.weight_sync.load_staging": "device"}),
    # `stage: host` is the default of a run.
    "dual_buffer_host": Way("one_step_off"),
    "verl_stock": Way("verl_separate_async"),
}
WARMUP = 2
"""Weight updates to skip: they touch the two arenas for the first time."""
REQUESTS = 4
"""Requests that each replica always has in flight."""
LIMIT_BYTES = 256 << 20
"""Block size for the measurement of the machine's limits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline bench weight-sync`."""
    parser.add_argument(
        "--params",
        default="100M",
        metavar="N",
        help="parameters of the model, e.g. 20M (default: %(default)s)",
    )
    parser.add_argument(
        "--replicas",
        type=int,
        default=2,
        metavar="N",
        help="rollout replicas, which generate throughout (default: %(default)s)",
    )
    parser.add_argument(
        "--versions",
        type=int,
        default=10,
        metavar="N",
        help="weight updates to measure (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=Path, default=argparse.SUPPRESS, metavar="FILE", help="write all results to FILE"
    )
    add_logs_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run all ways one after another. Returns 0 if all completed, 1 if one failed."""
    if args.replicas < 1 or args.versions < 1:
        raise ConfigError(f"--replicas and --versions must be >= 1, got {args.replicas} and {args.versions}")
    check_outputs(args.json, None, args.logs)
    parse_count(args.params)

    failed: dict[str, str] = {}

    data: dict[str, Any] = {
        "machine": machine(),
        "command": "async-pipeline " + " ".join(sys.argv[1:]),
        "params": parse_count(args.params),
        "replicas": args.replicas,
        "versions": args.versions,
        "limits": limits(),
        "failed": failed,
    }

    with job_logs(args.logs, failed) as root:
        task = make_task(parse_count(args.params), root / "task")
        for number, way in enumerate(WAYS, start=1):
            echo(f"[{number}/{len(WAYS)}] {way}; log in {root / way}")
            try:
                data[way] = run_way(way, root / way, task, args.replicas, args.versions, echo)
            except JobFailed as error:
                echo(f"  failed: {error}")
                failed[way] = str(error)
            if all(way in data for way in WAYS):
                data["ratios"] = ratios(data)
            if args.json:
                args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    echo("\n" + table(data))
    return 1 if failed else 0


def parse_count(text: str) -> int:
    """Parse a count such as `100M`. Raises ConfigError if it is not a positive count."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.upper())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--params must be a count such as 100M, got {text!r}")
    return round(float(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[match[2]])


def run_way(
    way: str, directory: Path, task: Path, replicas: int, versions: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run one way. Returns its figures. Raises JobFailed if the job fails or hangs."""
    directory.mkdir(parents=True)
    environment = {
        "ASYNC_PIPELINE_TASK": str(task),
        "ASYNC_PIPELINE_BENCH_VERSIONS": str(versions + WARMUP),
        "ASYNC_PIPELINE_BENCH_REQUESTS": str(REQUESTS),
    }
    command = command_of(ENTRY, overrides_of(way, directory, replicas))
    run_watched(
        directory, command, environment, counting=(PUBLICATION, versions + WARMUP, "weight update"), say=say
    )

    spans = read_spans(directory)
    loaded = next(span.facts for span in spans if span.name == LIMITS)
    return {**summary(costs(spans, WARMUP)), "limits_under_load": dict(loaded)}


def overrides_of(way: str, directory: Path, replicas: int) -> list[str]:
    """Return the overrides of a way for verl's entry point."""
    rollout = "actor_rollout_ref.rollout"
    values: dict[str, Any] = {
        **ARMS[WAYS[way].arm].overrides,
        **WAYS[way].overrides,
        f"{rollout}.n_gpus_per_node": replicas,
        f"{rollout}.engine_kwargs.vllm.worker_extension_cls": TIMED,
        "ray_kwargs.ray_init.num_gpus": replicas + 1,
        "trainer.default_local_dir": str(directory / "checkpoints"),
    }
    if ARMS[WAYS[way].arm].uses_pipeline:
        values["trainer.v1.async_pipeline.run_dir"] = str(directory / "run")
    return hydra_overrides(values)


def make_task(parameters: int, directory: Path) -> Path:
    """Write the toy's data with an untrained model of about this many parameters. Returns its directory."""
    from transformers import AutoTokenizer

    from ..toy.model import make_model

    toy = ensure_toy(
        ToySpec.of(seed=0, tied=True), Path(".cache/toy").resolve(), report=partial(echo, file=sys.stderr)
    )
    directory.mkdir(parents=True)
    for name in ("train.parquet", "val.parquet"):
        (directory / name).symlink_to(toy.dir / name)

    spec = shape_of(parameters)
    tokenizer = AutoTokenizer.from_pretrained(toy.dir / "model")
    model = make_model(spec, tokenizer, seed=0)
    model.to(torch.bfloat16).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    return directory


def shape_of(parameters: int) -> Any:
    """Return the shape of a model with about this many parameters: twelve blocks of the required width."""
    from ..toy.model import ModelSpec

    layers, head = 12, 64
    # A block has 4 d^2 parameters for attention and 3 d (8/3 d) for the MLP.
    width = max(head, round((parameters / layers / 12) ** 0.5 / head) * head)
    return ModelSpec(
        num_layers=layers, hidden_size=width, head_dim=head, intermediate_size=width * 8 // 3, init_std=0.02
    )


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


def ratios(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the ratios of the median stalls of this package's ways to verl's."""
    return {
        name.removesuffix("_s") + way.removeprefix("dual_buffer"): data[way][name]["median"]
        / data["verl_stock"][name]["median"]
        for way in WAYS
        if way != "verl_stock"
        for name in ("generator_stall_s", "trainer_stall_s")
    }


def table(data: Mapping[str, Any]) -> str:
    """Return a Markdown table of medians in milliseconds [min .. max], with ratios and rates."""
    names = ("trainer_stall_s", "generator_stall_s", "publication_s", "gather_s", "transfer_s", "load_s")
    lines = [
        "| ms | " + " | ".join(name.removesuffix("_s").replace("_", " ") for name in names) + " | hidden |"
    ]
    lines.append("| --- " * (len(names) + 2) + "|")
    for way in WAYS:
        if way in data:
            hidden = data[way].get("hidden_fraction")
            cells = [_ms(data[way].get(name)) for name in names] + [
                f"{hidden['median']:.0%}" if hidden else ""
            ]
            lines.append(f"| `{way}` | " + " | ".join(cells) + " |")

    if "ratios" in data:
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in data["ratios"].items())
        lines.append(f"\ndual_buffer / verl_stock: {shown}")

    rates = {way: {k: v for k, v in data[way].items() if k.endswith("_gb_s")} for way in WAYS if way in data}
    loaded = {
        f"limits during generation ({w})": data[w]["limits_under_load"]
        for w in rates
        if "limits_under_load" in data[w]
    }
    for title, row in (rates | {"limits of the idle machine": data["limits"]} | loaded).items():
        if row:
            lines.append(
                f"{title}, GB/s: " + ", ".join(f"{k.removesuffix('_gb_s')} {v:.1f}" for k, v in row.items())
            )
    return "\n".join(lines)


def _ms(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return ""
    return f"{spread['median'] * 1e3:.0f} [{spread['min'] * 1e3:.0f} .. {spread['max'] * 1e3:.0f}]"
