# SPDX-License-Identifier: Apache-2.0
"""The jobs of the weight-sync benchmark: their ways, overrides and hosts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.lab.bench import weight_sync_jobs
from recipe.async_pipeline.lab.bench.inputs.arms import SGLANG_BACKEND
from recipe.async_pipeline.lab.bench.weight_sync_jobs import (
    WARMUP,
    WAYS,
    Engines,
    jobs_of,
    overrides_of,
    run_ways,
    shape_of,
)
from recipe.async_pipeline.verl_bridge.rules.sglang_rules import CPU_WIDTH_ALIGNMENT


@pytest.mark.parametrize("wanted", [5 * 10**6, 10**8, 10**9])
def test_a_model_has_about_the_requested_parameters(wanted: int) -> None:
    shape = shape_of(wanted)
    width, inner = shape.hidden_size, shape.intermediate_size
    assert shape.num_layers * (4 * width**2 + 3 * width * inner) == pytest.approx(wanted, rel=0.35)


def test_heads_are_divisible_by_the_devices_of_a_replica() -> None:
    shape = shape_of(10**8, 2)
    assert (shape.hidden_size // shape.head_dim) % 2 == 0


@pytest.mark.parametrize(("parameters", "ranks"), [(2 * 10**6, 1), (10**7, 2), (10**8, 4)])
def test_a_model_is_not_padded_by_an_engine(parameters: int, ranks: int) -> None:
    assert shape_of(parameters, ranks).intermediate_size % (CPU_WIDTH_ALIGNMENT * ranks) == 0


def test_all_ways_have_the_same_engines(tmp_path: Path) -> None:
    staged, default, stock = (overrides_of(way, tmp_path, Engines(2)) for way in WAYS)
    assert staged == default, "they run in one job"
    for line in (
        "++actor_rollout_ref.rollout.n_gpus_per_node=2",
        "++actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "++ray_kwargs.ray_init.num_gpus=3",
        f"++actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls='{weight_sync_jobs.TIMED}'",
        "++actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=16",
    ):
        assert line in default and line in stock
    assert "++async_strategy='one_step_off'" in default
    assert "++trainer.v1.trainer_mode='separate_async'" in stock


def test_a_replica_of_several_devices_has_worker_processes(tmp_path: Path) -> None:
    for way in WAYS:
        lines = overrides_of(way, tmp_path, Engines(3, tensor_parallel=2))
        assert "++actor_rollout_ref.rollout.n_gpus_per_node=6" in lines
        assert "++ray_kwargs.ray_init.num_gpus=7" in lines
        assert "++actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend='mp'" in lines


def test_sglang_gets_as_many_tokens_and_a_module_that_verls_workers_import(tmp_path: Path) -> None:
    engines = Engines(1, tensor_parallel=2, requests=4, name="sglang")
    staged, default, stock = (overrides_of(way, tmp_path, engines) for way in WAYS)
    assert staged == default, "they run in one job"
    kwargs = "++actor_rollout_ref.rollout.engine_kwargs"
    for lines in (default, stock):
        assert "++actor_rollout_ref.rollout.name='sglang'" in lines
        assert f"{kwargs}.sglang.max_total_tokens={(2 * 4 + 8) * 128}" in lines
        assert not any("vllm" in line and "TimedWorker" in line for line in lines)
    backend = "++actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module="
    assert f"{backend}'{SGLANG_BACKEND}'" in stock
    assert not any(line.startswith(backend) for line in default)


def test_on_gpus_verl_sends_weights_by_nccl_and_engines_size_their_memory(tmp_path: Path) -> None:
    rollout = "++actor_rollout_ref.rollout"
    staged, default, stock = (overrides_of(way, tmp_path, Engines(1, device="cuda")) for way in WAYS)
    assert staged == default, "they run in one job"
    for lines in (default, stock):
        assert "++trainer.device='cuda'" in lines and "++ray_kwargs.ray_init.num_gpus=2" in lines
        assert f"{rollout}.engine_kwargs.vllm.num_gpu_blocks_override=null" in lines
        assert f"{rollout}.engine_kwargs.vllm.worker_extension_cls='{weight_sync_jobs.TIMED}'" in lines
    assert f"{rollout}.checkpoint_engine.backend='nccl'" in stock
    assert f"{rollout}.checkpoint_engine.custom_backend_module=null" in stock
    assert f"{rollout}.engine_kwargs.vllm.distributed_executor_backend=null" in stock
    assert not any("checkpoint_engine" in line for line in default)


def test_ways_of_one_trainer_share_a_job() -> None:
    assert jobs_of(list(WAYS)) == [("dual_buffer", "dual_buffer_host"), ("verl_stock",)]
    assert jobs_of(["verl_stock", "dual_buffer_host"]) == [("verl_stock",), ("dual_buffer_host",)]


def test_differences_are_sent_in_bfloat16(tmp_path: Path) -> None:
    lines = overrides_of("dual_buffer", tmp_path, Engines(2, hosts=2, delta=True))
    assert "++actor_rollout_ref.rollout.dtype='bfloat16'" in lines
    assert "++trainer.v1.async_pipeline.weight_sync.delta=true" in lines
    assert not any("num_gpus" in line for line in lines), "the Ray nodes have their devices already"


class FakeHosts:
    """Two hosts of which only the size is recorded."""

    sizes: list[tuple[int, int]] = []  # noqa: RUF012  emptied by the fixture
    events: list[str] = []  # noqa: RUF012

    class first:  # noqa: N801
        prefix = ("on-first",)

    overrides = ("cluster",)

    def __init__(self, first: int, second: int, environment: Mapping[str, str]) -> None:
        self.sizes.append((first, second))
        self.environment = environment

    def release_after(self, text: str, log: Path) -> None:
        self.events.append("release")

    def close(self) -> None:
        self.events.append("close")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[str], Mapping[str, str]]]:
    """The commands and environments of jobs, which do nothing but write the spans of two ways in turns."""
    found: list[tuple[Sequence[str], Mapping[str, str]]] = []

    def run_watched(
        directory: Path, command: Sequence[str], environment: Mapping[str, str], **others: Any
    ) -> None:
        found.append((command, environment))
        ways = environment["ASYNC_PIPELINE_BENCH_WAYS"].split(",")
        updates = int(environment["ASYNC_PIPELINE_BENCH_VERSIONS"])
        assert others["counting"][1] == updates * len(ways)
        spans = [
            ["publication", at, at + 0.1 * (1 + turn), {"way": way, "trainer_stall": 0.1 * (1 + turn)}]
            for update in range(updates)
            for turn, way in enumerate(ways)
            for at in [update * 10 + turn]
        ]
        lines = [*spans, ["limits", 90, 91, {"memcpy_gb_s": 5.0}]]
        (directory / "spans-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(weight_sync_jobs, "run_watched", run_watched)
    monkeypatch.setattr(weight_sync_jobs, "TwoHosts", FakeHosts)
    monkeypatch.setattr(FakeHosts, "sizes", [])
    monkeypatch.setattr(FakeHosts, "events", [])
    return found


Ran = list[tuple[Sequence[str], Mapping[str, str]]]


def test_ways_that_take_turns_are_measured_apart(ran: Ran, tmp_path: Path) -> None:
    ways = ["dual_buffer", "dual_buffer_host"]
    rows = run_ways(ways, tmp_path / "job", tmp_path, Engines(2, requests=3), 5, print)
    assert [rows[way]["publication_s"]["median"] for way in ways] == pytest.approx([0.1, 0.2])
    assert rows["dual_buffer"]["limits_under_load"] == {"memcpy_gb_s": 5.0}
    ((command, environment),) = ran
    assert command[0] == "bash" and FakeHosts.sizes == []
    assert environment["ASYNC_PIPELINE_BENCH_REQUESTS"] == "3"
    assert environment["ASYNC_PIPELINE_BENCH_VERSIONS"] == str(5 + WARMUP)


@pytest.mark.parametrize(
    ("replicas", "tensor_parallel", "sizes"), [(1, 1, (1, 1)), (2, 1, (2, 1)), (3, 1, (2, 2)), (4, 2, (5, 4))]
)
def test_the_larger_half_of_the_replicas_is_on_the_second_host(
    ran: Ran, tmp_path: Path, replicas: int, tensor_parallel: int, sizes: tuple[int, int]
) -> None:
    engines = Engines(replicas, tensor_parallel, hosts=2)
    run_ways(["dual_buffer"], tmp_path / "job", tmp_path, engines, 1, print)
    assert FakeHosts.sizes == [sizes]
    assert sorted(FakeHosts.events) == ["close", "release"]
    ((command, environment),) = ran
    assert command[0] == "on-first" and command[-1] == "cluster"
    assert environment["ASYNC_PIPELINE_BENCH_DIR"] == str(tmp_path / "job"), (
        "workers of both hosts write spans"
    )
