# SPDX-License-Identifier: Apache-2.0
"""The command of the weight-sync benchmark: its overrides, its output and its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.bench import weight_sync
from recipe.async_pipeline.bench.runner import JobFailed
from recipe.async_pipeline.bench.weight_sync import WAYS, overrides_of, parse_count, ratios, shape_of
from recipe.async_pipeline.cli.main import main
from recipe.async_pipeline.errors import ConfigError


@pytest.mark.parametrize(("text", "count"), [("100M", 10**8), ("0.5g", 5 * 10**8), ("7", 7), ("12k", 12_000)])
def test_parse_count_accepts_suffixes(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "M", "-3M", "0", "0M", "1T", "1 M"])
def test_parse_count_rejects_other_text(text: str) -> None:
    with pytest.raises(ConfigError, match="--params must be a count such as 100M"):
        parse_count(text)


@pytest.mark.parametrize("wanted", [5 * 10**6, 10**8, 10**9])
def test_a_model_has_about_the_requested_parameters(wanted: int) -> None:
    shape = shape_of(wanted)
    width, inner = shape.hidden_size, shape.intermediate_size
    assert shape.num_layers * (4 * width**2 + 3 * width * inner) == pytest.approx(wanted, rel=0.35)


def test_all_ways_have_the_same_engines(tmp_path: Path) -> None:
    staged, default, stock = (overrides_of(way, tmp_path, 2) for way in WAYS)
    for line in (
        "++actor_rollout_ref.rollout.n_gpus_per_node=2",
        "++ray_kwargs.ray_init.num_gpus=3",
        f"++actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls='{weight_sync.TIMED}'",
    ):
        assert line in default and line in staged and line in stock
    assert "++async_strategy='one_step_off'" in default
    assert set(staged) - set(default) == {"++trainer.v1.async_pipeline.weight_sync.load_staging='device'"}
    assert "++trainer.v1.trainer_mode='separate_async'" in stock


def row(stall: float) -> dict[str, Any]:
    spread = {"median": stall, "min": stall, "max": stall}
    return {"trainer_stall_s": spread, "generator_stall_s": spread, "publication_s": spread}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(weight_sync, "make_task", lambda parameters, directory: directory)
    monkeypatch.setattr(weight_sync, "LIMIT_BYTES", 1 << 20)


@pytest.mark.usefixtures("quick")
def test_figures_are_written_and_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stalls = {"dual_buffer": 0.2, "dual_buffer_host": 0.1, "verl_stock": 2.0}
    monkeypatch.setattr(weight_sync, "run_way", lambda way, *rest: row(stalls[way]))
    out = tmp_path / "w.json"
    # Options may also precede the name of the measurement.
    assert main(["bench", "--json", str(out), "weight-sync", "--logs", str(tmp_path / "logs")]) == 0

    data = json.loads(out.read_text())
    assert (data["params"], data["replicas"], data["versions"]) == (10**8, 2, 10)
    assert data["ratios"] == pytest.approx(
        {
            "generator_stall": 0.1,
            "trainer_stall": 0.1,
            "generator_stall_host": 0.05,
            "trainer_stall_host": 0.05,
        }
    )
    assert set(data["limits"]) == {"memcpy_gb_s", "shm_gb_s"}

    shown = capsys.readouterr().out
    assert "| `dual_buffer` | 200 [200 .. 200] |" in shown
    assert "generator stall 0.10, trainer stall 0.10" in shown


@pytest.mark.usefixtures("quick")
def test_a_failed_way_is_reported_and_the_others_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_way(way: str, *rest: Any) -> dict[str, Any]:
        if way == "verl_stock":
            raise JobFailed("status 1")
        return row(0.1)

    monkeypatch.setattr(weight_sync, "run_way", run_way)
    out = tmp_path / "w.json"
    assert main(["bench", "weight-sync", "--json", str(out), "--logs", str(tmp_path / "logs")]) == 1
    data = json.loads(out.read_text())
    assert data["failed"] == {"verl_stock": "status 1"}
    assert "dual_buffer" in data and "ratios" not in data


def test_replicas_and_versions_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "weight-sync", "--replicas", "0"]) == 2
    assert "--replicas and --versions must be >= 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [["--arms", "zzz"], ["--workload", "compute"], ["--repeats", "7"], ["--no-stock-poll"]]
)
def test_options_of_another_benchmark_are_rejected(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *option, "weight-sync"]) == 2
    assert f"{option[0]} is an option of `bench` itself" in capsys.readouterr().err


def test_ratios_are_this_package_over_verl() -> None:
    found = ratios({"dual_buffer": row(1.0), "dual_buffer_host": row(2.0), "verl_stock": row(4.0)})
    assert found["generator_stall"] == found["trainer_stall"] == 0.25
    assert found["generator_stall_host"] == found["trainer_stall_host"] == 0.5
