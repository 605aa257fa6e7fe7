# SPDX-License-Identifier: Apache-2.0
"""The nightly tier in ten parts: which tests have changed or waited longest, and the last run of each one.

A plugin of pytest. `--nightly-part` runs one part only and updates its rows of the table `nightly.tsv`, which
is committed. Other runs of nightly tests leave the table as it is.
"""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import pytest

TABLE = Path("tests", "nightly.tsv")
COLUMNS = ("test", "seconds", "run", "outcome")
PARTS = 10
"""Landings within which each nightly test runs, if each runs a part and no test changes."""
LONGEST_S = 300.0
"""What a nightly test may take on two idle cores."""
UNKNOWN_S = 120.0
"""Assumed for a test that has no row."""
ESTIMATED = "estimated"
MINUTE = "%Y-%m-%dT%H:%MZ"


class Run(NamedTuple):
    """The last run of a test that did not fail."""

    seconds: float
    """The fewest of all its passes, because machines are busy at times; shared fixtures count for the first
    test.
    """
    at: str
    """UTC time to the minute, which is the same for all tests of a session; empty if only estimated."""
    outcome: str
    """`passed`, `skipped` or `estimated`."""


Table = Mapping[str, Run]


def read_table(path: Path) -> dict[str, Run]:
    """Return the rows by test id; none if there is no file."""
    if not path.exists():
        return {}
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    return {test: Run(float(seconds), at, outcome) for test, seconds, at, outcome in rows}


def write_table(table: Table, path: Path) -> None:
    rows = [
        (test, f"{max(1.0, run.seconds):.0f}", run.at, run.outcome) for test, run in sorted(table.items())
    ]
    written = path.with_suffix(".new")
    written.write_text("".join("\t".join(row) + "\n" for row in [COLUMNS, *rows]), encoding="utf-8")
    os.replace(written, path)


def part_of(groups: Mapping[str, Sequence[str]], table: Table, changed: Collection[str] = ()) -> list[str]:
    """Return the tests of a part: a tenth of the tier by its seconds, and at most one group more.

    `groups`: tests by what they share; a group runs as a whole. Groups with a `changed` test are first, then
    those that have waited longest: a test without a run has waited for ever. Equal ones keep their order.
    """

    def waiting(tests: Sequence[str]) -> tuple[bool, str]:
        return first.isdisjoint(tests), min(_run(table, test).at for test in tests)

    first = set(changed)
    every = {*table, *(test for tests in groups.values() for test in tests)}
    size = sum(_run(table, test).seconds for test in every) / PARTS
    part: list[str] = []
    seconds = 0.0
    for tests in sorted(groups.values(), key=waiting):
        if seconds >= size:
            break
        part += tests
        seconds += sum(_run(table, test).seconds for test in tests)
    return part


def _run(table: Table, test: str) -> Run:
    return table.get(test, Run(UNKNOWN_S, "", ESTIMATED))


def updated(
    table: Table, runs: Table, changed: Collection[str] = (), tier: Collection[str] | None = None
) -> dict[str, Run]:
    """Return the table after a session.

    A `changed` test that has not run now is only estimated: the next part begins with it, although the table
    is committed by then. `tier`: all nightly tests, if the session has collected them; others lose their row.
    """
    merged = dict(table)
    for test in changed:
        if test in table:
            merged[test] = table[test]._replace(at="", outcome=ESTIMATED)
    for test, run in runs.items():
        before = table.get(test)
        if before is not None and before.outcome == run.outcome and test not in changed:
            run = run._replace(seconds=min(before.seconds, run.seconds))
        merged[test] = run
    return merged if tier is None else {test: run for test, run in merged.items() if test in tier}


def changed_files(path: Path, repository: Path) -> dict[str, datetime]:
    """Return the files below `tests/` that differ from the commit of the table, with the time of their last
    change; none in a checkout without Git, or if the table was never committed.
    """

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=repository, check=True, capture_output=True, text=True)
        return done.stdout.splitlines()

    if not (repository / ".git").exists():
        return {}
    committed = git("log", "-1", "--format=%H", "--", str(path))
    if not committed:
        return {}
    names = git("diff", "--name-only", "--no-renames", committed[0], "--", "tests")
    names += git("ls-files", "--others", "--exclude-standard", "--", "tests")
    files = {name: repository / name for name in names}
    return {
        name: datetime.fromtimestamp(file.stat().st_mtime, timezone.utc)
        for name, file in files.items()
        if file.exists()
    }


def changed_tests(tests: Iterable[str], table: Table, files: Mapping[str, datetime]) -> list[str]:
    """Return the tests whose own file has changed and that have not run since.

    A helper does not count: nearly every change touches one.
    """

    def waits(test: str) -> bool:
        changed = files.get(test.partition("::")[0])
        return changed is not None and _run(table, test).at <= changed.strftime(MINUTE)

    return [test for test in tests if waits(test)]


def group_of(item: pytest.Item) -> str:
    """Return what an item shares with others: the values of a fixture that is made once for a file. An item
    without one is a group of its own.
    """
    found = getattr(item, "callspec", None)
    fixtures = item._fixtureinfo.name2fixturedefs if found is not None else {}  # type: ignore[attr-defined]
    shared = [
        f"{name}={value!r}"
        for name, value in sorted(found.params.items() if found is not None else ())
        if name in fixtures and fixtures[name][-1].scope != "function"
    ]
    return " ".join([item.nodeid.partition("::")[0], *shared]) if shared else item.nodeid


def lines_of(table: Table, now: Mapping[str, str]) -> list[str]:
    """Return the table for the terminal; `now` has the outcomes of this session."""
    tests = sorted({*table, *now})
    lines = []
    for test in tests:
        run = table.get(test, Run(0.0, "", "never passed"))
        at = "in this run" if test in now else run.at or "not yet run"
        long = f", more than {LONGEST_S:.0f}" if run.seconds > LONGEST_S else ""
        lines.append(f"{now.get(test, run.outcome):<12} {at:<17} {run.seconds:>5.0f} s  {test}{long}")
    total = sum(run.seconds for run in table.values())
    return [*lines, f"{len(tests)} tests, {total:.0f} s in all, {total / PARTS:.0f} s a part"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly-part",
        action="store_true",
        help="a tenth of the nightly tier: the tests of files that have changed since the table was "
        "committed, then those that have waited longest; updates the table",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--nightly-part"):
        config.pluginmanager.register(_Session(config), "nightly-session")


class _Session:
    """Selects a part, notes its runs in the table, and shows it."""

    def __init__(self, config: pytest.Config) -> None:
        self._root, self._path = config.rootpath, config.rootpath / TABLE
        self._is_whole = config.args_source is not config.ArgsSource.ARGS and not config.option.keyword
        self._tier: list[str] = []
        self._changed: list[str] = []
        self._at = datetime.now(timezone.utc).strftime(MINUTE)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._outcomes: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for item in items:
            if item.get_closest_marker("nightly"):
                self._tier.append(item.nodeid)
                groups[group_of(item)].append(item.nodeid)
        table = read_table(self._path)
        self._changed = changed_tests(self._tier, table, changed_files(self._path, self._root))
        part = set(part_of(groups, table, self._changed))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in part])
        items[:] = [item for item in items if item.nodeid in part]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.outcome != "passed" or report.when == "teardown":
            self._outcomes.setdefault(report.nodeid, report.outcome)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._outcomes:
            return
        runs = {
            test: Run(self._seconds[test], self._at, outcome)
            for test, outcome in self._outcomes.items()
            if outcome != "failed"
        }
        tier = self._tier if self._is_whole else None
        table = updated(read_table(self._path), runs, self._changed, tier)
        write_table(table, self._path)
        terminalreporter.section("a part of the nightly tier")
        for line in lines_of(table, self._outcomes):
            terminalreporter.write_line(line)
