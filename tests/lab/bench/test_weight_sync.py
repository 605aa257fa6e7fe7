# SPDX-License-Identifier: Apache-2.0
"""The command of the weight-sync benchmark: its overrides, its output and its file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.async_pipeline.cli.main import main
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.bench import weight_sync
from recipe.async_pipeline.lab.bench.runner import JobFailed
from recipe.async_pipeline.lab.bench.weight_sync import parse_count
from recipe.async_pipeline.lab.bench.weight_sync_jobs import Engines


@pytest.mark.parametrize(("text", "count"), [("100M", 10**8), ("0.5g", 5 * 10**8), ("7", 7), ("12k", 12_000)])
def test_parse_count_accepts_suffixes(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "M", "-3M", "0", "0M", "1T", "1 M"])
def test_parse_count_rejects_other_text(text: str) -> None:
    with pytest.raises(ConfigError, match="--params must be a count such as 100M"):
        parse_count(text)


def row(stall: float) -> dict[str, Any]:
    spread = {"median": stall, "min": stall, "max": stall}
    return {"trainer_stall_s": spread, "generator_stall_s": spread, "publication_s": spread}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(weight_sync, "make_task", lambda parameters, directory, tensor_parallel: directory)
    monkeypatch.setattr(weight_sync, "LIMIT_BYTES", 1 << 20)


@pytest.mark.usefixtures("quick")
def test_each_number_of_replicas_is_a_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stalls = {"dual_buffer": 0.2, "dual_buffer_host": 0.1, "verl_stock": 2.0}
    asked = []

    def run_ways(
        ways: Sequence[str], directory: Path, task: Path, engines: Engines, *rest: Any
    ) -> dict[str, Any]:
        asked.append((ways, directory.name, engines))
        return {way: row(stalls[way] * engines.replicas) for way in ways}

    monkeypatch.setattr(weight_sync, "run_ways", run_ways)
    out = tmp_path / "w.json"
    # Options may also precede the name of the measurement.
    status = main(
        ["bench", "--json", str(out), "weight-sync", "--replicas", "1,4", "--requests", "1"]
        + ["--tensor-parallel", "2", "--logs", str(tmp_path / "logs")]
    )
    assert status == 0
    ours = ("dual_buffer", "dual_buffer_host")
    assert asked[0] == (ours, "dual_buffer+dual_buffer_host-1", Engines(1, 2, 1))
    jobs = [ours, ("verl_stock",)]
    assert [(ways, engines.replicas) for ways, _, engines in asked] == [(w, n) for n in (1, 4) for w in jobs]

    data = json.loads(out.read_text())
    assert (data["params"], data["tensor_parallel"], data["requests"], data["versions"]) == (10**8, 2, 1, 10)
    assert list(data["replicas"]) == ["1", "4"]
    assert data["replicas"]["4"]["ratios"] == pytest.approx(
        {
            "generator_stall": 0.1,
            "trainer_stall": 0.1,
            "generator_stall_host": 0.05,
            "trainer_stall_host": 0.05,
        }
    )
    assert data["replicas"]["4"]["dual_buffer"]["publication_growth"] == 4.0
    assert set(data["limits"]) == {"memcpy_gb_s", "shm_gb_s"}
    assert "| 4 | `dual_buffer` | 800 [800 .. 800] |" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_a_failed_way_is_reported_and_the_others_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_ways(ways: Sequence[str], *rest: Any) -> dict[str, Any]:
        if "verl_stock" in ways:
            raise JobFailed("status 1")
        return {way: row(0.1) for way in ways}

    monkeypatch.setattr(weight_sync, "run_ways", run_ways)
    out = tmp_path / "w.json"
    assert main(["bench", "weight-sync", "--json", str(out), "--logs", str(tmp_path / "logs")]) == 1
    data = json.loads(out.read_text())
    assert data["failed"] == {"verl_stock-2": "status 1"}
    assert "dual_buffer" in data["replicas"]["2"] and "ratios" not in data["replicas"]["2"]


@pytest.mark.usefixtures("quick")
def test_ways_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[tuple[Sequence[str], Engines]] = []

    def run_ways(
        ways: Sequence[str], directory: Path, task: Path, engines: Engines, *rest: Any
    ) -> dict[str, Any]:
        ran.append((ways, engines))
        return {way: row(0.1) for way in ways}

    monkeypatch.setattr(weight_sync, "run_ways", run_ways)
    command = ["bench", "weight-sync", "--logs", str(tmp_path / "logs")]
    assert main([*command, "--ways", "verl_stock,dual_buffer"]) == 0
    assert main([*command, "--hosts", "2", "--delta"]) == 0
    assert main([*command, "--engine", "sglang", "--ways", "dual_buffer"]) == 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert main([*command, "--device", "cuda", "--ways", "dual_buffer"]) == 0
    assert ran == [
        (("verl_stock",), Engines(2)),
        (("dual_buffer",), Engines(2)),
        (("dual_buffer", "dual_buffer_host"), Engines(2, hosts=2, delta=True)),
        (("dual_buffer",), Engines(2, name="sglang")),
        (("dual_buffer",), Engines(2, device="cuda")),
    ]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--replicas", "0"], "--replicas must be different numbers >= 1 such as 1,2,4, got '0'"),
        (["--replicas", "2,2"], "--replicas must be different numbers"),
        (["--replicas", "1,"], "--replicas must be different numbers"),
        (["--versions", "0"], "--versions must be >= 1, got 0"),
        (["--tensor-parallel", "0"], "--tensor-parallel must be >= 1, got 0"),
        (["--requests", "-1"], "--requests must be >= 0, got -1"),
        (["--ways", "nccl"], "--ways must be different names of dual_buffer, dual_buffer_host, verl_stock"),
        (
            ["--hosts", "2", "--ways", "verl_stock"],
            "--ways must be different names of dual_buffer, dual_buffer_host on two hosts, got 'verl_st",
        ),
        (["--delta"], "--delta needs --hosts 2"),
        (["--device", "cuda", "--engine", "sglang"], "--device cuda is implemented for --engine vllm on one"),
        (["--device", "cuda", "--hosts", "2"], "--device cuda is implemented for --engine vllm on one host"),
    ],
)
def test_options_are_checked(option: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "weight-sync", *option]) == 2
    assert capsys.readouterr().err.startswith(f"async-pipeline bench weight-sync: {message}")


def test_too_few_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert (
        main(["bench", "weight-sync", "--device", "cuda", "--replicas", "1,2", "--tensor-parallel", "2"]) == 2
    )
    assert "needs 5 devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [["--arms", "zzz"], ["--workload", "compute"], ["--repeats", "7"], ["--no-stock-poll"]]
)
def test_options_of_another_benchmark_are_rejected(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *option, "weight-sync"]) == 2
    assert f"{option[0]} is an option of `bench` itself" in capsys.readouterr().err
