# SPDX-License-Identifier: Apache-2.0
"""Ten parts cover the nightly tier: what has changed or waited longest first, tests of a fixture together."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import REPOSITORY
from tests.nightly import (
    MINUTE,
    PARTS,
    TABLE,
    Run,
    changed_files,
    changed_tests,
    part_of,
    read_table,
    updated,
    write_table,
)

TIERS = st.lists(st.integers(1, 2000), min_size=1, max_size=40).map(
    lambda seconds: {f"t{i}": Run(float(s), "2026-01-01T00:00Z", "passed") for i, s in enumerate(seconds)}
)
SHARED = st.integers(1, 5)
"""How many tests share a fixture."""


def landed(number: int) -> str:
    return f"2026-02-01T{number:02}:00Z"


def groups_of(tests: Iterable[str], size: int = 1) -> dict[str, list[str]]:
    """Return groups of `size` tests, the last of what is left."""
    names = [*tests]
    return {str(at): names[at : at + size] for at in range(0, len(names), size)}


@given(TIERS, SHARED)
def test_ten_landings_run_every_test_if_each_commits_the_table(tier: dict[str, Run], shared: int) -> None:
    table, run = tier, set[str]()
    groups = groups_of(tier, shared)
    for number in range(PARTS):
        part = part_of(groups, table)
        table = updated(table, {t: tier[t]._replace(at=landed(number)) for t in part})
        run.update(part)
    assert run == tier.keys()


@given(TIERS, SHARED)
def test_a_part_is_a_tenth_and_at_most_one_group_more(tier: dict[str, Run], shared: int) -> None:
    groups, part = groups_of(tier, shared), part_of(groups_of(tier, shared), tier)
    tenth = sum(run.seconds for run in tier.values()) / PARTS
    last = next(tests for tests in groups.values() if part[-1] in tests)
    assert part[-len(last) :] == last, "a group is never cut"
    assert sum(tier[test].seconds for test in part[: -len(last)]) < tenth


def test_tests_without_a_run_are_first_then_the_longest_waiting() -> None:
    table = {
        "late": Run(10, landed(2), "passed"),
        "early": Run(10, landed(1), "passed"),
        "guessed": Run(10, "", "estimated"),
    }
    groups = groups_of(["late", "early", "guessed"])
    order = []
    while groups:
        (first,) = part_of(groups, table)
        order.append(first)
        groups = {name: tests for name, tests in groups.items() if tests != [first]}
    assert order == ["guessed", "early", "late"]
    assert part_of(groups_of(["late", "new"]), table)[0] == "new"


def test_changed_tests_are_before_all_others_with_what_shares_their_fixture() -> None:
    table = {name: Run(10, landed(at), "passed") for at, name in enumerate(["a", "b", "c", "d"])}
    table["new"] = Run(10, "", "estimated")
    assert part_of(groups_of(table, 2), table, ["d"]) == ["c", "d"]
    assert part_of(groups_of(table), table, ["d"]) == ["d"]


def test_a_changed_test_that_does_not_fit_is_the_first_to_wait() -> None:
    table = {name: Run(10, landed(1), "passed") for name in ("a", "b")}
    after = updated(table, {"a": Run(30, landed(2), "passed")}, ["a", "b"])
    assert after == {"a": Run(30, landed(2), "passed"), "b": Run(10, "", "estimated")}, (
        "the seconds of a changed test are those of its last run"
    )


def test_a_failed_test_keeps_its_place_and_a_renamed_one_loses_its_row() -> None:
    table = {name: Run(10, landed(1), "passed") for name in ("failed", "old name", "passed")}
    after = updated(table, {"passed": Run(9, landed(2), "passed")}, tier=["failed", "new name", "passed"])
    assert after == {"failed": table["failed"], "passed": Run(9, landed(2), "passed")}


def test_seconds_are_the_fewest_of_all_passes_once_one_was_measured() -> None:
    table = {"a": Run(10, "", "estimated")}
    for seconds, kept in ((30, 30), (20, 20), (50, 20)):
        table = updated(table, {"a": Run(seconds, landed(seconds % 24), "passed")})
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


def test_a_change_since_the_commit_of_the_table_is_found(git: Git, tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    before = datetime(2026, 1, 1, tzinfo=timezone.utc).timestamp()
    written: list[str] = []

    def write(name: str) -> None:
        # Git does not read a file again that has its time and its size.
        written.append(name)
        (tests / name).write_text("\n" * len(written))
        os.utime(tests / name, (before, before))

    def commit(message: str) -> None:
        git("add", ".")
        git("commit", "--quiet", "-m", message)

    assert changed_files(TABLE, tmp_path / "no checkout") == {}
    write("test_old.py")
    commit("before")
    assert changed_files(TABLE, tmp_path) == {}, "the table was never committed"
    write(TABLE.name)
    commit("table")
    write("test_committed.py")
    commit("after")
    assert changed_files(TABLE, tmp_path).keys() == {"tests/test_committed.py"}
    write("test_old.py")
    write("test_untracked.py")
    (tests / "test_committed.py").unlink()
    files = changed_files(TABLE, tmp_path)
    assert files.keys() == {"tests/test_old.py", "tests/test_untracked.py"}
    assert {when.strftime(MINUTE) for when in files.values()} == {"2026-01-01T00:00Z"}
    write(TABLE.name)
    commit("table")
    assert changed_files(TABLE, tmp_path) == {}


def test_a_test_that_has_run_since_its_file_changed_is_not_changed() -> None:
    table = {
        "tests/test_it.py::test_since": Run(10, landed(2), "passed"),
        "tests/test_it.py::test_before": Run(10, landed(0), "passed"),
        "tests/test_other.py::test_other": Run(10, landed(0), "passed"),
    }
    files = {"tests/test_it.py": datetime.strptime(landed(1), MINUTE), "tests/helper.py": datetime.max}
    tests = [*table, "tests/test_it.py::test_new"]
    assert changed_tests(tests, table, files) == [
        "tests/test_it.py::test_before",
        "tests/test_it.py::test_new",
    ]


FILES = {
    "test_it.py": """
import pytest
nightly = pytest.mark.nightly
@pytest.mark.parametrize('name', ['nightly'])
def test_default(name): pass
@nightly
def test_passes(): pass
@nightly
def test_fails(): assert False
@nightly
def test_skips(): pytest.skip('no device')
@nightly
def test_recent(): assert False
@nightly
def test_stops(): raise KeyboardInterrupt
""",
    "test_shared.py": """
import pytest
pytestmark = pytest.mark.nightly
@pytest.fixture(scope='module', params=['old', 'new'])
def engine(request): return request.param
@pytest.mark.parametrize('way', [1, 2])
def test_one(engine, way): pass
def test_other(engine): pass
@pytest.mark.parametrize('engine', ['new'], indirect=True)
def test_new_only(engine): pass
@pytest.mark.parametrize('case', [1, 2])
def test_alone(case): pass
""",
}
Session = Callable[..., str]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """Runs pytest on `FILES` and returns what it prints."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = nightly\n")
    (tmp_path / "tests").mkdir()
    for name, text in FILES.items():
        (tmp_path / "tests" / name).write_text(text)

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "tests.nightly", "--import-mode=importlib", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
        )
        return done.stdout + done.stderr

    return run


def rows_of(path: Path) -> dict[str, Run]:
    return {test.partition("::test_")[2]: run for test, run in read_table(path).items()}


@pytest.mark.slow
def test_runs_of_a_part_are_noted_and_the_rest_is_shown(session: Session, tmp_path: Path) -> None:
    path = tmp_path / TABLE
    waited = {f"tests/test_it.py::test_{name}": Run(4000, landed(1), "passed") for name in ("recent", "gone")}
    write_table(waited, path)
    (tmp_path / "tests" / "test_shared.py").unlink()

    session("-m", "nightly", "tests/test_it.py")
    assert read_table(path) == waited, "only --nightly-part writes the table"

    printed = session("--nightly-part")
    found = rows_of(path)
    assert {name: run.outcome for name, run in found.items()} == {
        "passes": "passed",
        "skips": "skipped",
        "recent": "passed",
    }, printed
    assert found["recent"].at == landed(1) < found["passes"].at
    assert ", more than 300" in printed
    for line in ("passed       in this run", "failed       in this run", f"passed       {landed(1)}"):
        assert line in printed, printed


@pytest.mark.slow
def test_tests_of_one_fixture_are_in_one_part_and_other_files_keep_their_rows(
    session: Session, tmp_path: Path
) -> None:
    path = tmp_path / TABLE
    here = [
        "one[old-1]",
        "one[old-2]",
        "other[old]",
        "one[new-1]",
        "one[new-2]",
        "other[new]",
        "new_only[new]",
    ]
    table = {f"tests/test_shared.py::test_{name}": Run(100, landed(2), "passed") for name in here}
    table["tests/test_shared.py::test_new_only[new]"] = Run(100, landed(1), "passed")
    for case in (1, 2):
        table[f"tests/test_shared.py::test_alone[{case}]"] = Run(100, landed(3), "passed")
    elsewhere = {"tests/test_it.py::test_passes": Run(100, landed(0), "passed")}
    write_table({**table, **elsewhere}, path)

    printed = session("--nightly-part", "tests/test_shared.py")
    ran = {name for name, run in rows_of(path).items() if run.at > landed(4)}
    assert ran == {name for name in here if "new" in name}, printed
    assert read_table(path).keys() == {*table, *elsewhere}
