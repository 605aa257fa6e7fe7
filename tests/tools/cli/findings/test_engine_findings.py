# SPDX-License-Identifier: Apache-2.0
"""`doctor --engine`: one row for each engine and for each difference, and the rows of the plain doctor."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from recipe.async_pipeline.cli import main
from recipe.async_pipeline.console import EXIT_OK, EXIT_USERS
from recipe.async_pipeline.installed.engines import FILE, EngineTree, files_id
from recipe.async_pipeline.installed.verl import patches_dir
from recipe.async_pipeline.tools.cli.findings import engine_findings
from recipe.async_pipeline.tools.contract import engines
from recipe.async_pipeline.tools.contract.engines import Difference
from tests.fakes.engine_differences import GONE, compare_as

FOLDER = patches_dir()
VLLM = EngineTree(name="vllm", folder=Path("tree/vllm"), version="0.33.0")
SGLANG = EngineTree(name="sglang", folder=Path("tree/sglang"), version="0.5.23")
ON_CPU = dataclasses.replace(GONE, name="vllm._custom_ops:isa", breaks=("experts on a CPU",), cpu_only=True)
LORA = dataclasses.replace(GONE, breaks=("LoRA",))
BENCHMARK = dataclasses.replace(GONE, breaks=("benchmarks",))


def found(monkeypatch: pytest.MonkeyPatch, *differences: Difference) -> None:
    """Have every comparison find these differences."""
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    compare_as(monkeypatch, differences)
    monkeypatch.setattr(engines, "unpacked", lambda root: [VLLM])


def test_an_engine_that_fits_is_one_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch)
    tested = engines.load(FOLDER)["vllm"].version
    assert main.main(["doctor", "--engine", "tree"]) == EXIT_OK
    assert capsys.readouterr().out.split(maxsplit=2) == [
        "ok",
        "vllm",
        f"0.33.0 at tree/vllm; tested: {tested}; 140 names compared, no differences\n",
    ]


def test_a_difference_has_its_own_row_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, GONE, ON_CPU)
    assert main.main(["doctor", "--engine", "tree"]) == EXIT_USERS
    _, row, on_cpu = capsys.readouterr().out.splitlines()
    assert row.startswith(
        "fail  vllm change      breaks version spans: vllm.v1.request:Request.num_output_tokens is missing; "
        "used by verl_bridge/rollout/vllm/plugin.py; use vllm "
    )
    assert on_cpu.startswith("warn  vllm change      breaks experts on a CPU: ")

    assert main.main(["doctor", "--engine", "tree", "--json"]) == EXIT_USERS
    whole, row, _ = json.loads(capsys.readouterr().out)
    assert whole["verdict"] == "fail" and "2 differences" in whole["detail"]
    assert {key: row[key] for key in ("name", "change", "used_by", "breaks")} == {
        "name": GONE.name,
        "change": "is missing",
        "used_by": ["verl_bridge/rollout/vllm/plugin.py"],
        "breaks": ["version spans"],
    }


def test_what_a_cpu_needs_fails_on_a_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, ON_CPU)
    assert main.main(["doctor", "--engine", "tree"]) == EXIT_OK
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert main.main(["doctor", "--engine", "tree"]) == EXIT_USERS


def test_without_a_folder_the_installed_engines_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch)
    monkeypatch.setattr(engine_findings, "installed", lambda: [VLLM, SGLANG])
    assert [row.subject for row in engine_findings.examine_engines(None)] == ["vllm", "sglang"]
    monkeypatch.setattr(engine_findings, "installed", lambda: [])
    (row,) = engine_findings.examine_engines(None)
    assert row.verdict == "fail" and row.detail == "neither vllm nor sglang is installed"


VERLS = dataclasses.replace(GONE, breaks=(f"{engines.STARTS_IN_VERL} 0.9.1",))
TESTED = dataclasses.replace(VLLM, version=engines.load(FOLDER)["vllm"].version)


@pytest.mark.parametrize(
    ("engine", "difference", "words"),
    [
        (VLLM, GONE, f"use vllm {TESTED.version}, or change the named files"),
        (VLLM, VERLS, f"used by verl; use vllm {TESTED.version}, or a version that has it; no file of this"),
        (TESTED, GONE, f"these are not the files of vllm {TESTED.version}: install it again, or change the"),
    ],
)
def test_the_remedy_fits_the_version_and_what_breaks(
    monkeypatch: pytest.MonkeyPatch, engine: EngineTree, difference: Difference, words: str
) -> None:
    found(monkeypatch, difference)
    monkeypatch.setattr(engines, "unpacked", lambda root: [engine])
    _, row = engine_findings.examine_engines(Path("tree"))
    assert words in f"{row.detail}; {row.remedy}"


def test_each_engine_has_its_own_row_of_the_plain_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch)
    rows = engine_findings.check_versions([VLLM, SGLANG], FOLDER, 1)
    assert [row.subject for row in rows] == ["vllm contract", "sglang contract"]


def test_any_folder_can_be_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert main.main(["doctor", "--engine", "here"]) == EXIT_USERS
    error = capsys.readouterr().err
    assert (
        f"{tmp_path / 'here'} has no vllm/__init__.py" in error and "give the folder that contains" in error
    )
    assert main.main(["doctor", "--engine", ""]) == EXIT_USERS
    assert "--engine must name a folder, got ''; leave the value out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--engine", "x", "--verl-dir", "x"], "exclude each other"),
        (["--engine", "x", "--cluster"], "exclude each other"),
        (["--cluster", "--verl-dir", "x"], "exclude each other"),
        (["--nodes", "2"], "--nodes requires --cluster"),
    ],
)
def test_one_thing_is_examined_at_a_time(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["doctor", *options]) == EXIT_USERS
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("differences", "verdict", "words"),
    [
        ((), "ok", "has all that runs use"),
        ((BENCHMARK, ON_CPU), "ok", "has all that runs use"),
        ((GONE,), "fail", "1 thing that runs use changed"),
        ((LORA,), "warn", "breaks only LoRA"),
        ((LORA, GONE), "fail", "2 things that runs use changed"),
    ],
)
def test_the_plain_doctor_has_a_row_for_another_version(
    monkeypatch: pytest.MonkeyPatch, differences: tuple[Difference, ...], verdict: str, words: str
) -> None:
    found(monkeypatch, *differences)
    (row,) = engine_findings.check_versions([VLLM], FOLDER, 1)
    assert (row.subject, row.verdict) == ("vllm contract", verdict) and words in row.detail


@pytest.mark.parametrize(
    ("num_gpus", "platform", "verdict"),
    [(0, "", "warn"), (0, "cuda", "ok"), (1, "cpu", "warn"), (1, "", "ok")],
)
def test_the_plain_doctor_counts_what_a_cpu_needs_where_no_gpu_is(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, platform: str, verdict: str
) -> None:
    found(monkeypatch, ON_CPU)
    monkeypatch.setenv("VERL_PLATFORM", platform)
    (row,) = engine_findings.check_versions([VLLM], FOLDER, num_gpus)
    assert row.verdict == verdict, row
    assert ("breaks only experts on a CPU" in row.detail) is (verdict == "warn")


def test_one_usable_engine_suffices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found(monkeypatch, GONE)
    contracts = engines.load(FOLDER)
    files = contracts["sglang"].files
    tested = dataclasses.replace(contracts["sglang"], files_id=files_id(SGLANG.folder, files))
    (tmp_path / FILE).write_text(engines.as_text([contracts["vllm"], tested]), encoding="utf-8")
    broken, fits = engine_findings.check_versions([VLLM, SGLANG], tmp_path, 1)
    assert (broken.verdict, fits.verdict) == ("warn", "ok")
    assert "with the files that this package is tested with" in fits.detail
    assert engine_findings.check_versions([], FOLDER, 1) == ()
