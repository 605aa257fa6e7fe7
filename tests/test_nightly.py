# SPDX-License-Identifier: Apache-2.0
"""Ten parts cover the nightly tier, whether or not its table is kept up to date."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import REPOSITORY
from tests.nightly import PARTS, TABLE, Run, commits_since, parts_of, read_table, updated, write_table

TIERS = st.lists(st.integers(1, 2000), min_size=1, max_size=40).map(
    lambda seconds: {f"t{i}": Run(float(s), "2026-01-01T00:00Z", "passed") for i, s in enumerate(seconds)}
)


def landed(number: int) -> str:
    return f"2026-02-01T{number:02}:00Z"


@given(TIERS)
def test_ten_landings_run_every_test_if_each_commits_the_table(tier: dict[str, Run]) -> None:
    table, run = tier, set[str]()
    for number in range(PARTS):
        part = parts_of([*tier], table)[0]
        table = updated(table, {t: tier[t]._replace(at=landed(number)) for t in part}, [*tier])
        run.update(part)
    assert run == tier.keys()


@given(TIERS)
def test_ten_commits_run_every_test_even_if_none_updates_the_table(tier: dict[str, Run]) -> None:
    parts = parts_of([*tier], tier)
    assert len(parts) <= PARTS
    assert sorted(test for part in parts for test in part) == sorted(tier)


@given(TIERS)
def test_a_part_is_a_tenth_and_at_most_one_test_more(tier: dict[str, Run]) -> None:
    tenth = sum(run.seconds for run in tier.values()) / PARTS
    for part in parts_of([*tier], tier):
        assert sum(tier[test].seconds for test in part[:-1]) < tenth


def test_tests_without_a_run_are_first_then_the_longest_waiting() -> None:
    table = {
        "late": Run(10, landed(2), "passed"),
        "early": Run(10, landed(1), "passed"),
        "guessed": Run(10, "", "estimated"),
    }
    assert [part[0] for part in parts_of(["late", "early", "guessed"], table)] == ["guessed", "early", "late"]
    assert parts_of(["late", "new"], table)[0] == ["new"]


def test_a_failed_test_keeps_its_place_and_a_renamed_one_loses_its_row() -> None:
    table = {name: Run(10, landed(1), "passed") for name in ("failed", "old name", "passed")}
    after = updated(table, {"passed": Run(9, landed(2), "passed")}, ["failed", "new name", "passed"])
    assert after == {"failed": table["failed"], "passed": Run(9, landed(2), "passed")}


def test_seconds_are_the_fewest_of_all_passes_once_one_was_measured() -> None:
    table = {"a": Run(10, "", "estimated")}
    for seconds, kept in ((30, 30), (20, 20), (50, 20)):
        table = updated(table, {"a": Run(seconds, landed(seconds % 24), "passed")}, None)
        assert table["a"] == Run(kept, landed(seconds % 24), "passed")


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = {"b[x-1]": Run(12, landed(1), "passed"), "a": Run(1, "", "estimated")}
    write_table(table, tmp_path / "table.tsv")
    assert read_table(tmp_path / "table.tsv") == table
    assert read_table(tmp_path / "none.tsv") == {}


def test_the_committed_table_names_tests_that_exist() -> None:
    for test in read_table(REPOSITORY / TABLE):
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (REPOSITORY / file).read_text(encoding="utf-8"), test


Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path) -> Git:
    """Runs Git in a repository of the test."""
    names = {
        f"GIT_{role}_{what}": "someone" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    environment = {**os.environ, **names, "GIT_CONFIG_GLOBAL": os.devnull}

    def run(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        ).stdout.strip()

    run("init", "--quiet")
    return run


def test_every_commit_after_the_table_moves_to_another_part(git: Git, tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    assert commits_since(table, tmp_path / "no checkout") == 0
    git("commit", "--quiet", "--allow-empty", "-m", "before")
    assert commits_since(table, tmp_path) == 1
    table.write_text("a")
    git("add", ".")
    for number in range(3):
        git("commit", "--quiet", "--allow-empty", "-m", str(number))
        assert commits_since(table, tmp_path) == number
    git("clone", "--quiet", "--depth", "1", tmp_path.as_uri(), "shallow")
    assert commits_since(table, tmp_path / "shallow") == int(git("rev-parse", "HEAD"), 16)


@pytest.mark.slow
def test_runs_are_noted_and_the_rest_is_shown(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = nightly\n")
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_it.py").write_text(
        "import pytest\n"
        "nightly = pytest.mark.nightly\n"
        "@pytest.mark.parametrize('name', ['nightly'])\ndef test_default(name): pass\n"
        "@nightly\ndef test_passes(): pass\n"
        "@nightly\ndef test_fails(): assert False\n"
        "@nightly\ndef test_skips(): pytest.skip('no device')\n"
        "@nightly\ndef test_recent(): assert False\n"
        "@nightly\ndef test_stops(): raise KeyboardInterrupt\n"
    )
    path = tmp_path / TABLE
    waited = {f"tests/test_it.py::test_{name}": Run(4000, landed(1), "passed") for name in ("recent", "gone")}
    write_table(waited, path)

    options = ("-p", "tests.nightly", "--nightly-part", "oldest", "--import-mode=importlib")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert "part 1 of" in done.stdout, done.stdout + done.stderr
    found = {test.partition("::test_")[2]: run for test, run in read_table(path).items()}
    assert {name: run.outcome for name, run in found.items()} == {
        "passes": "passed",
        "skips": "skipped",
        "recent": "passed",
    }
    assert found["recent"].at == landed(1) < found["passes"].at
    for line in ("passed       in this run", "failed       in this run", f"passed       {landed(1)}"):
        assert line in done.stdout, done.stdout
