# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline bench weight-sync`: what a publication costs, with our ways and with verl's, on real
engines.
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
from .outputs import check_outputs, job_logs
from .report import machine
from .runner import JobFailed, command_of, run_watched
from .spans import read_spans
from .stalls import LIMITS, PUBLICATION, costs, summary

ENTRY = "recipe.async_pipeline.verl_bridge.bench.weight_sync_job"
TIMED = "recipe.async_pipeline.verl_bridge.bench.weight_sync_worker.TimedWorkerExtension"


class Way(NamedTuple):
    """How to publish: an arm, and settings beside it."""

    arm: str
    overrides: Mapping[str, Any] = {}


WAYS = {
    # `stage: device`: all that a publication does can be hidden behind generation but an exchange; it takes a
    # spare copy.
    "dual_buffer": Way("one_step_off", {"trainer.v1.async_pipeline.stage": "device"}),
    # `stage: host`, which is what a run does by default.
    "dual_buffer_host": Way("one_step_off"),
    "verl_stock": Way("verl_separate_async"),
}
WARMUP = 2
"""Publications that are not counted: each of the two arenas is touched for the first time."""
REQUESTS = 4
"""Each replica answers this many at a time, all the while."""
LIMIT_BYTES = 256 << 20
"""The machine's own limits are measured with blocks of this size."""


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
        help="rollout replicas, generating all the while (default: %(default)s)",
    )
    parser.add_argument(
        "--versions", type=int, default=10, metavar="N", help="publications to measure (default: %(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, default=argparse.SUPPRESS, metavar="FILE", help="write everything there"
    )
    parser.add_argument(
        "--logs",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="keep what the jobs print and write (default: kept only if one fails)",
    )


def run(args: argparse.Namespace) -> int:
    """Run all ways, one after the other. Status 0: all completed; 1: one failed."""
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
    """`100M` -> 100 000 000. Raises ConfigError: not a count."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.upper())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--params must be a count such as 100M, got {text!r}")
    return round(float(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[match[2]])


def run_way(
    way: str, directory: Path, task: Path, replicas: int, versions: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Raises JobFailed."""
    directory.mkdir(parents=True)
    environment = {
        "ASYNC_PIPELINE_TASK": str(task),
        "ASYNC_PIPELINE_BENCH_VERSIONS": str(versions + WARMUP),
        "ASYNC_PIPELINE_BENCH_REQUESTS": str(REQUESTS),
    }
    command = command_of(ENTRY, overrides_of(way, directory, replicas))
    run_watched(
        directory, command, environment, counting=(PUBLICATION, versions + WARMUP, "publication"), say=say
    )
    spans = read_spans(directory)
    loaded = next(span.facts for span in spans if span.name == LIMITS)
    return {**summary(costs(spans, WARMUP)), "limits_under_load": dict(loaded)}


def overrides_of(way: str, directory: Path, replicas: int) -> list[str]:
    """The command line of a way, below verl's entry point."""
    rollout = "actor_rollout_ref.rollout"
    values: dict[str, Any] = {
        **ARMS[WAYS[way].arm].overrides,
        **WAYS[way].overrides,
        f"{rollout}.n_gpus_per_node": replicas,
        f"{rollout}.engine_kwargs.vllm.worker_extension_cls": TIMED,
        "ray_kwargs.ray_init.num_gpus": replicas + 1,
        "trainer.default_local_dir": str(directory / "checkpoints"),
    }
    if ARMS[WAYS[way].arm].ours:
        values["trainer.v1.async_pipeline.run_dir"] = str(directory / "run")
    return hydra_overrides(values)


def make_task(parameters: int, directory: Path) -> Path:
    """The toy's data with an untrained model of about so many parameters. Returns its directory."""
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
    """A model of about so many parameters: twelve blocks, each as wide as it takes."""
    from ..toy.model import ModelSpec

    layers, head = 12, 64
    # A block has 4 d^2 parameters for attention and 3 d (8/3 d) for the rest.
    width = max(head, round((parameters / layers / 12) ** 0.5 / head) * head)
    return ModelSpec(
        num_layers=layers, hidden_size=width, head_dim=head, intermediate_size=width * 8 // 3, init_std=0.02
    )


def limits() -> dict[str, float]:
    """GB/s that one thread gets of this machine: a copy between two warm blocks, and one into warm shared
    memory.
    """
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
    """Our stalls over verl's, of the medians."""
    return {
        name.removesuffix("_s") + way.removeprefix("dual_buffer"): data[way][name]["median"]
        / data["verl_stock"][name]["median"]
        for way in WAYS
        if way != "verl_stock"
        for name in ("generator_stall_s", "trainer_stall_s")
    }


def table(data: Mapping[str, Any]) -> str:
    """A Markdown table: medians in milliseconds, with [smallest .. largest]."""
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
        lines.append(f"\nours / verl_stock: {shown}")
    rates = {way: {k: v for k, v in data[way].items() if k.endswith("_gb_s")} for way in WAYS if way in data}
    loaded = {
        f"limits beside generation ({w})": data[w]["limits_under_load"]
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
