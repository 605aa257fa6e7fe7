# SPDX-License-Identifier: Apache-2.0
"""The nightly tier in ten parts: which tests have waited longest, and what the last run of each one was.

A plugin of pytest. Every run of a nightly test updates its row of the table `nightly.tsv`, which is
committed; `--nightly-part` runs one part only.
"""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import pytest

TABLE = Path("tests", "nightly.tsv")
COLUMNS = ("test", "seconds", "run", "outcome")
PARTS = 10
"""Landings within which each nightly test runs, if each landing runs a part."""
UNKNOWN_S = 120.0
"""Assumed for a test that has no row."""
ESTIMATED = "estimated"


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


def parts_of(tests: Sequence[str], table: Table) -> list[list[str]]:
    """Return at most `PARTS` parts of about the same seconds, the tests that have waited longest first. The
    first part is at least as long as the mean.

    Tests without a run are before all others. Tests that have waited equally long keep their order, in which
    the tests of a file share fixtures.
    """
    runs = {test: table.get(test, Run(UNKNOWN_S, "", ESTIMATED)) for test in tests}
    size = sum(run.seconds for run in runs.values()) / PARTS
    parts: list[list[str]] = []
    seconds = 0.0
    for test in sorted(tests, key=lambda test: runs[test].at):
        if seconds >= len(parts) * size:
            parts.append([])
        parts[-1].append(test)
        seconds += runs[test].seconds
    return parts


def updated(table: Table, runs: Table, tier: Sequence[str] | None) -> dict[str, Run]:
    """Return the table after a session. `tier`: all nightly tests, if the session has collected them."""
    merged = dict(table)
    for test, run in runs.items():
        before = table.get(test)
        if before is not None and before.outcome == run.outcome:
            run = run._replace(seconds=min(before.seconds, run.seconds))
        merged[test] = run
    return merged if tier is None else {test: merged[test] for test in tier if test in merged}


def commits_since(path: Path, repository: Path) -> int:
    """Return the number of commits since a file was changed, or 0 in a checkout without Git.

    A shallow clone has no history to count, so the id of its commit is the number.
    """

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=repository, check=True, capture_output=True, text=True
        ).stdout.strip()

    if not (repository / ".git").exists():
        return 0
    if git("rev-parse", "--is-shallow-repository") == "true":
        return int(git("rev-parse", "HEAD"), 16)
    changed = git("log", "-1", "--format=%H", "--", str(path))
    return int(git("rev-list", "--count", f"{changed}..HEAD" if changed else "HEAD"))


def lines_of(table: Table, now: Mapping[str, str]) -> list[str]:
    """Return the table for the terminal; `now` has the outcomes of this session."""
    tests = sorted({*table, *now})
    lines = []
    for test in tests:
        run = table.get(test, Run(0.0, "", "never passed"))
        at = "in this run" if test in now else run.at or "not yet run"
        lines.append(f"{now.get(test, run.outcome):<12} {at:<17} {run.seconds:>5.0f} s  {test}")
    total = sum(run.seconds for run in table.values())
    return [*lines, f"{len(tests)} tests, {total:.0f} s in all, {total / PARTS:.0f} s a part"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly-part",
        choices=("oldest", "commit"),
        help="one of ten parts of the nightly tier: the tests that have waited longest, or, if the table has "
        "not been updated, as many parts after them as there are later commits",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Session(config), "nightly-session")


class _Session:
    """Selects a part, notes the runs of nightly tests, and shows the table."""

    def __init__(self, config: pytest.Config) -> None:
        self._chosen: str | None = config.getoption("--nightly-part")
        self._root, self._path = config.rootpath, config.rootpath / TABLE
        self._tier: list[str] | None = None
        self._title = "nightly tier"
        self._at = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ")
        self._noted: set[str] = set()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._outcomes: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._chosen is None or not items:
            return
        self._tier = [item.nodeid for item in items if item.get_closest_marker("nightly")]
        parts = parts_of(self._tier, read_table(self._path))
        later = commits_since(self._path, self._root) if self._chosen == "commit" else 0
        number = later % len(parts)
        self._title = f"nightly tier, part {number + 1} of {len(parts)} by waiting time"
        part = set(parts[number])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in part])
        items[:] = [item for item in items if item.nodeid in part]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._noted = {item.nodeid for item in session.items if item.get_closest_marker("nightly")}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self._noted:
            return
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
        table = updated(read_table(self._path), runs, self._tier)
        write_table(table, self._path)
        terminalreporter.section(self._title)
        for line in lines_of(table, self._outcomes):
            terminalreporter.write_line(line)
