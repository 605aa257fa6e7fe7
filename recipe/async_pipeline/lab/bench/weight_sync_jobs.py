# SPDX-License-Identifier: Apache-2.0
"""The jobs of `async-pipeline bench weight-sync`: ways to update weights, and their measurement.

Ways of the same trainer take turns within one job, with the same engines in the same minutes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...console import echo
from ..tasks.build import ToySpec, ensure_toy
from .inputs.arms import ARMS, ENGINES, SGLANG_BACKEND, hydra_overrides
from .measuring.spans import SPANS_DIR, read_spans
from .measuring.stalls import LIMITS, PUBLICATION, costs, summary
from .runner import LOG, command_of, run_watched
from .two_hosts import TwoHosts

ENTRY = "recipe.async_pipeline.lab.bench.jobs.weight_updates.weight_sync_job"
TIMED = "recipe.async_pipeline.lab.bench.jobs.weight_updates.weight_sync_worker.TimedWorkerExtension"
WARMUP = 2
"""Weight updates of each way to skip: they touch the two arenas, or a standby copy, for the first time."""
REQUESTS = 4
"""Requests that each replica always has in flight."""
SPARE_BLOCKS = 8
"""Blocks of keys and values that a replica has beyond two for each request. The default, 1 GiB each, would be
most of a replica's memory.
"""
BLOCK_TOKENS = 128
"""Tokens of a block in vLLM's CPU build. SGLang gets as many tokens."""
STARTING = "starting training workers"
"""The line of a job's log after which its main processes are on their hosts."""
VERSIONS, REQUESTS_EACH = "ASYNC_PIPELINE_BENCH_VERSIONS", "ASYNC_PIPELINE_BENCH_REQUESTS"
WAYS_OF_JOB = "ASYNC_PIPELINE_BENCH_WAYS"
"""Environment variables of a job: the weight updates of each way, the requests in flight on each replica, and
the names of the ways.
"""


class Way(NamedTuple):
    """A way to update weights: an arm, and for this package where a version is staged."""

    arm: str
    stage: str = ""
    """A value of `weight_sync.load_staging`."""


WAYS: Mapping[str, Way] = {
    # Hides everything but an exchange behind generation, at the cost of a standby copy.
    "dual_buffer": Way("one_step_off", "device"),
    # The default of a run.
    "dual_buffer_host": Way("one_step_off", "host"),
    "verl_stock": Way("verl_separate_async"),
}


class Engines(NamedTuple):
    """The replicas of a job, where they are, and what they do meanwhile."""

    replicas: int
    tensor_parallel: int = 1
    requests: int = REQUESTS
    """Requests that each replica always has in flight."""
    hosts: int = 1
    """1, or 2: half of the replicas, rounded up, are then on a host without a trainer."""
    delta: bool = False
    """Whether versions travel to the other host as differences; the replicas then compute in bfloat16."""
    name: str = ENGINES[0]
    """The rollout engine."""
    device: str = "cpu"
    """`cpu`, or `cuda`, where verl's manager sends weights by NCCL."""


def jobs_of(ways: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the ways of each job: ways of the same trainer together, in the order of their first one."""
    jobs: dict[str, list[str]] = {}
    for way in ways:
        jobs.setdefault(WAYS[way].arm, []).append(way)
    return [tuple(names) for names in jobs.values()]


def run_ways(
    ways: Sequence[str],
    directory: Path,
    task: Path,
    engines: Engines,
    versions: int,
    say: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Run ways of one trainer in turns. Returns the figures of each.

    Raises JobFailed if the job fails or hangs, ConfigError if two hosts are not possible here.
    """
    directory.mkdir(parents=True)
    environment = {
        "ASYNC_PIPELINE_TASK": str(task),
        VERSIONS: str(versions + WARMUP),
        REQUESTS_EACH: str(engines.requests),
        WAYS_OF_JOB: ",".join(ways),
    }
    updates = (versions + WARMUP) * len(ways)
    with _hosts(engines, directory, environment) as hosts:
        overrides = [*overrides_of(ways[0], directory, engines), *(hosts.overrides if hosts else [])]
        run_watched(
            directory,
            [*(hosts.first.prefix if hosts else []), *command_of(ENTRY, overrides, engines.device)],
            hosts.environment if hosts else environment,
            counting=(PUBLICATION, updates, "weight update"),
            say=say,
        )

    spans = read_spans(directory)
    under_load = next(span.facts for span in spans if span.name == LIMITS)
    return {
        way: {**summary(costs(spans, WARMUP, way)), "limits_under_load": dict(under_load)} for way in ways
    }


@contextmanager
def _hosts(engines: Engines, directory: Path, environment: Mapping[str, str]) -> Iterator[TwoHosts | None]:
    """Provide the hosts of a job, or None if this machine is the only one."""
    if engines.hosts == 1:
        yield None
        return
    away = (engines.replicas + 1) // 2
    at_home = 1 + (engines.replicas - away) * engines.tensor_parallel
    settings = {**environment, SPANS_DIR: str(directory)}
    hosts = TwoHosts(at_home, away * engines.tensor_parallel, settings)
    releasing = threading.Thread(
        target=hosts.release_after, args=(STARTING, directory / LOG), name="release", daemon=True
    )
    try:
        releasing.start()
        yield hosts
    finally:
        hosts.close()
        releasing.join()


def overrides_of(way: str, directory: Path, engines: Engines) -> list[str]:
    """Return the overrides of a way for verl's entry point; ways of one arm have the same."""
    rollout, devices = "actor_rollout_ref.rollout", engines.replicas * engines.tensor_parallel
    values: dict[str, Any] = {
        **ARMS[WAYS[way].arm].overrides,
        f"{rollout}.name": engines.name,
        f"{rollout}.n_gpus_per_node": devices,
        f"{rollout}.tensor_model_parallel_size": engines.tensor_parallel,
        "trainer.default_local_dir": str(directory / "checkpoints"),
        **ENGINE_OVERRIDES[engines.name](way, engines),
    }
    if engines.device == "cuda":
        values |= ON_CUDA
        if not ARMS[WAYS[way].arm].uses_pipeline:
            values |= VERLS_ON_CUDA
    if engines.hosts == 1:
        values["ray_kwargs.ray_init.num_gpus"] = devices + 1
    if ARMS[WAYS[way].arm].uses_pipeline:
        values["trainer.v1.async_pipeline.run_dir"] = str(directory / "run")
    if engines.delta:
        # In float32 almost every value changes with each step.
        values[f"{rollout}.dtype"] = "bfloat16"
        values["trainer.v1.async_pipeline.weight_sync.delta"] = True
    return hydra_overrides(values)


ON_CUDA: Mapping[str, Any] = {
    "trainer.device": "cuda",
    # Keys and values: a small share, since several copies of the weights are on the device.
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.4,
    "actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override": None,
}
VERLS_ON_CUDA: Mapping[str, Any] = {
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "nccl",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module": None,
    "actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend": None,
}
"""verl's transport between devices, instead of the one that serves it on a CPU."""


def _of_vllm(way: str, engines: Engines) -> dict[str, Any]:
    kwargs = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    values: dict[str, Any] = {
        f"{kwargs}.worker_extension_cls": TIMED,
        f"{kwargs}.num_gpu_blocks_override": _blocks(engines),
    }
    if engines.tensor_parallel > 1 and engines.device == "cpu":
        # The engine core cannot be its own worker then.
        values[f"{kwargs}.distributed_executor_backend"] = "mp"
    return values


def _of_sglang(way: str, engines: Engines) -> dict[str, Any]:
    rollout = "actor_rollout_ref.rollout"
    values: dict[str, Any] = {
        f"{rollout}.engine_kwargs.sglang.max_total_tokens": _blocks(engines) * BLOCK_TOKENS
    }
    if not ARMS[WAYS[way].arm].uses_pipeline:
        values[f"{rollout}.checkpoint_engine.custom_backend_module"] = SGLANG_BACKEND
    return values


def _blocks(engines: Engines) -> int:
    return 2 * engines.requests + SPARE_BLOCKS


ENGINE_OVERRIDES: Mapping[str, Callable[[str, Engines], dict[str, Any]]] = dict(
    zip(ENGINES, (_of_vllm, _of_sglang), strict=True)
)
"""The overrides of a way that depend on the engine."""


def make_task(parameters: int, directory: Path, tensor_parallel: int = 1) -> Path:
    """Write the toy's data with an untrained model of about this many parameters. Returns its directory."""
    from transformers import AutoTokenizer

    from ..tasks.model import make_model

    toy = ensure_toy(
        ToySpec.of(seed=0, tied=True), Path(".cache/toy").resolve(), report=partial(echo, file=sys.stderr)
    )
    directory.mkdir(parents=True)
    for name in ("train.parquet", "val.parquet"):
        (directory / name).symlink_to(toy.dir / name)

    spec = shape_of(parameters, tensor_parallel)
    tokenizer = AutoTokenizer.from_pretrained(toy.dir / "model")
    model = make_model(spec, tokenizer, seed=0)
    model.to(torch.bfloat16).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    return directory


def shape_of(parameters: int, tensor_parallel: int = 1) -> Any:
    """Return the shape of a model with about this many parameters: twelve blocks of the required width.

    `tensor_parallel` divides its heads, and 32 the MLP's share of a rank, which SGLang would pad on a CPU.
    """
    from ..tasks.model import ModelSpec

    layers, head = 12, 64
    # A block has 4 d^2 parameters for attention and 3 d (8/3 d) for the MLP.
    heads = max(1, round((parameters / layers / 12) ** 0.5 / head / tensor_parallel)) * tensor_parallel
    unit = 32 * tensor_parallel
    inner = heads * head * 8 // 3 // unit * unit
    return ModelSpec(
        num_layers=layers,
        hidden_size=heads * head,
        head_dim=head,
        intermediate_size=inner,
        init_std=0.02,
    )
