# SPDX-License-Identifier: Apache-2.0
"""Parts cover the nightly tier: changed tests first, then the ones that have waited longest."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import REPOSITORY
from tests.nightly import (
    COLUMNS,
    PARTS,
    TABLE,
    Run,
    Table,
    changed_at,
    digests,
    exists,
    file_of,
    part_of,
    read_table,
    updated,
    write_table,
)

TIERS = st.lists(st.integers(1, 2000), min_size=1, max_size=40).map(
    lambda seconds: {f"t{i}": Run(float(s), "2026-01-01T00:00Z", "passed") for i, s in enumerate(seconds)}
)


def landed(number: int) -> str:
    return f"2026-02-01T{number:02}:00Z"


def part_alone(tier: Iterable[str], table: Table, *changed: str) -> list[str]:
    """Return the part of a tier whose tests share nothing; the ones of `changed` files, the last one first,
    differ from the noted ones.
    """
    tests = [[test] for test in tier]
    codes = {test: "another" if file_of(test) in changed else "noted" for [test] in tests}
    times = {file_of(test): 0.0 for test in codes} | {file: -float(at) for at, file in enumerate(changed)}
    return part_of(tests, table, codes, times)


@given(TIERS)
def test_as_many_sessions_as_parts_run_every_test_if_each_commits_the_table(tier: dict[str, Run]) -> None:
    table, run = tier, set[str]()
    for number in range(PARTS):
        part = part_alone(tier, table)
        table = updated(table, {t: tier[t]._replace(at=landed(number)) for t in part}, [*tier], [])
        run.update(part)
    assert run == tier.keys()


@given(TIERS)
def test_a_part_is_a_tenth_and_at_most_one_test_more(tier: dict[str, Run]) -> None:
    tenth = sum(run.seconds for run in tier.values()) / PARTS
    part = part_alone(tier, tier)
    assert sum(tier[test].seconds for test in part[:-1]) < tenth <= sum(tier[t].seconds for t in part)


def test_changed_files_are_first_then_tests_without_a_run_then_the_longest_waiting() -> None:
    table = {
        "a.py::late": Run(10, landed(2), "passed", "noted"),
        "b.py::early": Run(1000, landed(1), "passed"),
        "c.py::guessed": Run(10, "", "estimated"),
        "d.py::changed": Run(10, landed(3), "passed", "noted"),
    }
    assert part_alone(table, table, "d.py")[:3] == ["d.py::changed", "c.py::guessed", "b.py::early"]
    assert part_alone(table, table)[:2] == ["c.py::guessed", "b.py::early"]
    assert part_alone([*table, "e.py::new"], table)[0] == "e.py::new"


def test_the_file_that_was_changed_last_is_first_and_then_what_failed() -> None:
    table = {
        "a.py::old": Run(10, landed(1), "passed", "noted"),
        "b.py::new": Run(10, landed(2), "passed", "noted"),
        "c.py::red": Run(10, landed(3), "failed", "noted"),
        "d.py::same": Run(1000, landed(1), "passed", "noted"),
    }
    codes = {test: "another" if file_of(test) in ("a.py", "b.py") else "noted" for test in table}
    times = {"a.py": 7.0, "b.py": 9.0, "c.py": 3.0, "d.py": 8.0}
    found = part_of([[test] for test in table], table, codes, times)
    assert found == ["b.py::new", "a.py::old", "c.py::red", "d.py::same"]


def test_a_file_is_changed_at_its_commit_or_now(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("")
    assert changed_at(file) == 0.0, "no repository"
    who = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
    at = {**os.environ, "GIT_COMMITTER_DATE": "2026-01-02T03:04:05Z"}
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, env=at, check=True)
    assert changed_at(file) == 1767323045.0
    before = time.time()
    file.write_text("x = 1\n")
    assert changed_at(file) >= before


def test_a_changed_file_is_first_until_each_of_its_tests_has_run() -> None:
    table = {f"a.py::{name}": Run(100, landed(9), "passed", "noted") for name in "xy"}
    table["b.py::early"] = Run(100, landed(1), "passed", "noted")
    for number, expected in enumerate(("a.py::x", "a.py::y", "b.py::early"), start=10):
        part = part_alone(table, table, "a.py")
        assert part == [expected]
        table = updated(table, {expected: Run(100, landed(number), "passed", "another")}, [], [])


def test_tests_that_share_a_fixture_stay_together() -> None:
    table = {name: Run(100, landed(day), "passed") for day, name in enumerate(("a", "b", "c", "d"), start=1)}
    codes, times = dict.fromkeys(table, "noted"), dict.fromkeys(table, 0.0)
    assert part_of([["b"], ["a", "d"], ["c"]], table, codes, times) == ["a", "d"]


TEST_FILE = """
import json
LIMIT = 1
def helper(): return LIMIT
def test_one():
    assert helper()
def test_two(): pass
"""


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("assert helper()", "assert helper()  # a comment", set[str]()),
        ("import json", "import os", set[str]()),
        ("def test_two(): pass", "def test_three(): pass", {"test_two"}),
        ("assert helper()", "assert not helper()", {"test_one"}),
        ("LIMIT = 1", "LIMIT = 2", {"helper", "test_one", "test_two"}),
    ],
)
def test_a_test_changed_if_it_or_what_tests_share_did(old: str, new: str, changed: set[str]) -> None:
    before, after = digests(TEST_FILE), digests(TEST_FILE.replace(old, new))
    assert {name for name in before if before[name] != after.get(name)} == changed


def test_of_two_rows_of_a_test_the_newer_one_counts(tmp_path: Path) -> None:
    """A merge may keep both."""
    rows = [("a", "1", landed(2), "passed"), ("a", "2", landed(1), "failed"), ("a", "3", "", "estimated")]
    (tmp_path / "table.tsv").write_text("".join("\t".join(row) + "\n" for row in [COLUMNS, *rows, COLUMNS]))
    assert read_table(tmp_path / "table.tsv") == {"a": Run(1, landed(2), "passed")}


def test_a_test_that_did_not_run_keeps_its_row_and_a_renamed_one_loses_it() -> None:
    names = ("a.py::other", "a.py::old_name", "a.py::passed[1]", "a.py::passed[old]", "b.py::other")
    table = {name: Run(10, landed(1), "passed") for name in names}
    now = {"a.py::passed[1]": Run(9, landed(2), "passed")}
    gone_if = {"a.py": {"a.py::old_name", "a.py::passed[old]"}, "a.py::passed": {"a.py::passed[old]"}}
    for place, gone in {**gone_if, "a.py::passed[1]": set[str]()}.items():
        after = updated(table, now, ["a.py::other", "a.py::new_name", "a.py::passed[1]"], [place])
        assert after == {name: run for name, run in {**table, **now}.items() if name not in gone}


def test_seconds_are_the_fewest_of_all_passes_once_one_was_measured() -> None:
    table = {"a": Run(10, "", "estimated")}
    for seconds, kept in ((30, 30), (20, 20), (50, 20)):
        table = updated(table, {"a": Run(seconds, landed(seconds % 24), "passed")}, [], [])
        assert table["a"] == Run(kept, landed(seconds % 24), "passed")
    other = {"a": Run(40, landed(1), "passed", "another")}
    assert updated(table, other, [], [])["a"].seconds == 40, "of the test as it is"
    assert updated(table, other, [], [], slow=True)["a"] == Run(20, landed(1), "passed", "another")


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = {"b[x-1]": Run(12, landed(1), "passed", "0a1b"), "a": Run(1, "", "estimated")}
    write_table(table, tmp_path / "table.tsv")
    assert read_table(tmp_path / "table.tsv") == table
    assert read_table(tmp_path / "none.tsv") == {}


def test_the_committed_table_names_tests_that_exist() -> None:
    table = read_table(REPOSITORY / TABLE)
    assert [test for test in table if not exists(test, REPOSITORY)] == [], "run `bash run_scripts/fix.sh`"
    assert not exists("tests/test_nightly.py::test_gone[a-1]", REPOSITORY)


@pytest.fixture
def toy_tier(tmp_path: Path) -> Callable[..., str]:
    """Runs pytest, with options, on a file of nightly tests that has a table; returns what it printed."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  nightly\n  short\n")
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_it.py").write_text(
        "import pytest\n"
        "nightly = pytest.mark.nightly\n"
        "@pytest.fixture(scope='module', params='ab')\ndef engine(request): return request.param\n"
        "@pytest.mark.parametrize('name', ['nightly'])\ndef test_default(name): pass\n"
        "@nightly\n@pytest.mark.short\ndef test_passes(): pass\n"
        "@nightly\n@pytest.mark.parametrize('way', '12')\ndef test_shares(engine, way): pass\n"
        "@pytest.fixture(scope='module')\ndef nodes(): return 2\n"
        "@nightly\n@pytest.mark.parametrize('way', '12')\ndef test_shares_nodes(nodes, way): pass\n"
        "@nightly\ndef test_fails(): assert False\n"
        "@nightly\ndef test_skips(): pytest.skip('no device')\n"
        "@nightly\ndef test_recent(): assert False\n"
        "@nightly\ndef test_stops(): raise KeyboardInterrupt\n"
    )
    names = ("recent", "gone", "shares[a-1]", "shares[b-1]", "shares[b-2]", "shares_nodes[1]")
    late = dict.fromkeys(names, landed(1))
    waited = {
        f"tests/test_it.py::test_{name}": Run(10 if "[" in name else 4900, at, "passed")
        for name, at in late.items()
    }
    write_table(waited, tmp_path / TABLE)

    def run(*options: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "tests.nightly", "--import-mode=importlib", *options],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
        )
        return done.stdout + done.stderr

    return run


@pytest.mark.slow
def test_a_part_is_noted_and_the_rest_is_shown(toy_tier: Callable[..., str], tmp_path: Path) -> None:
    printed = toy_tier("--nightly-part")
    found = {test.partition("::test_")[2]: run for test, run in read_table(tmp_path / TABLE).items()}
    assert {name: (run.outcome, run.at == landed(1)) for name, run in found.items()} == {
        "passes": ("passed", False),
        "skips": ("skipped", False),
        "fails": ("failed", False),
        "recent": ("passed", True),
        # One of the two had no run, and they share a fixture.
        "shares_nodes[1]": ("passed", False),
        "shares_nodes[2]": ("passed", False),
        "shares[a-1]": ("passed", False),
        "shares[a-2]": ("passed", False),
        "shares[b-1]": ("passed", True),
        "shares[b-2]": ("passed", True),
    }
    assert found["passes"].code == digests((tmp_path / "tests" / "test_it.py").read_text())["test_passes"]
    for line in ("passed       in this run", "failed       in this run", f"passed       {landed(1)}"):
        assert line in printed


@pytest.mark.slow
def test_the_named_tests_run_and_other_rows_stay(toy_tier: Callable[..., str], tmp_path: Path) -> None:
    before = read_table(tmp_path / TABLE)
    assert "1 passed" in toy_tier("--nightly-part", "tests/test_it.py::test_passes")
    toy_tier("--nightly-part", "-k", "skips")
    toy_tier("--nightly-part", "tests", "-m", "nightly and short")
    after = read_table(tmp_path / TABLE)
    assert after.keys() - before.keys() == {f"tests/test_it.py::test_{name}" for name in ("passes", "skips")}
    assert before.items() <= after.items()


@pytest.mark.slow
def test_only_a_part_writes_the_table(toy_tier: Callable[..., str], tmp_path: Path) -> None:
    before = (tmp_path / TABLE).read_bytes()
    assert "2 passed" in toy_tier("-k", "passes or default", "-m", "nightly or not nightly")
    assert (tmp_path / TABLE).read_bytes() == before
