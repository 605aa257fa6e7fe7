# SPDX-License-Identifier: Apache-2.0
"""The nightly tier in parts: which tests have waited longest, and what the last run of each one was.

A plugin of pytest. `--nightly-part` runs a part of about a tenth of the tier, or the tests that the command
line names, and updates the table `nightly.tsv`, which is committed; no other run writes it. The digest of a
test's code shows whether the test has run as it is. A merge may keep two rows for a test, of which the newer
one counts; `python -m tests.nightly` removes the other, and the rows of functions that are gone.
"""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TABLE = Path("tests", "nightly.tsv")
COLUMNS = ("test", "seconds", "run", "outcome", "code")
PARTS = 10
"""A part has at least this share of the tier's seconds."""
UNKNOWN_S = 120.0
"""Assumed for a test that has no row."""
ESTIMATED, FAILED = "estimated", "failed"


class Run(NamedTuple):
    """The last run of a test."""

    seconds: float
    """The fewest of all passes with this code, because machines are busy at times, and of the code before if
    the pass was on a slow machine; shared fixtures count for the first test.
    """
    at: str
    """UTC time to the minute, which is the same for all tests of a session; empty if only estimated."""
    outcome: str
    """`passed`, `skipped`, `failed` or `estimated`."""
    code: str = ""
    """`digests` of the test at that time; empty if only estimated."""


Table = Mapping[str, Run]


def read_table(path: Path) -> dict[str, Run]:
    """Return the rows by test id, of two the newer one; none if there is no file."""
    if not path.exists():
        return {}
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    # A merge may also keep two heads.
    rows = sorted((row for row in lines if row[0] != COLUMNS[0]), key=lambda row: row[COLUMNS.index("run")])
    return {test: Run(float(seconds), *rest) for test, seconds, *rest in rows}


def write_table(table: Table, path: Path) -> None:
    rows = [(test, f"{max(1.0, run.seconds):.0f}", *run[1:]) for test, run in sorted(table.items())]
    written = path.with_suffix(".new")
    written.write_text("".join("\t".join(row).rstrip() + "\n" for row in [COLUMNS, *rows]), encoding="utf-8")
    os.replace(written, path)


def digests(code: str) -> dict[str, str]:
    """Return a digest for each function of a file of tests: of it and of all that is neither another test, an
    import nor a comment. The same with each version of Python.
    """
    lines = code.splitlines()

    def text(node: Any) -> str:
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
        own = (line.partition("  # ")[0].rstrip() for line in lines[first - 1 : node.end_lineno])
        return "\n".join(line for line in own if line and not line.lstrip().startswith("#"))

    body = [node for node in ast.parse(code).body if not isinstance(node, ast.Import | ast.ImportFrom)]
    named = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    shared = "".join(text(node) for node in body if not getattr(node, "name", "").startswith("test_"))
    return {
        name: hashlib.sha256((shared + text(node)).encode()).hexdigest()[:8] for name, node in named.items()
    }


def digests_of(tests: Iterable[str], root: Path) -> dict[str, str]:
    """Return the digest of each test, named by its id."""
    files = {file: digests((root / file).read_text(encoding="utf-8")) for file in map(file_of, tests)}
    return {test: files[file_of(test)].get(function_of(test), "") for test in tests}


def file_of(test: str) -> str:
    return test.partition("::")[0]


def function_of(test: str) -> str:
    return test.partition("::")[2].partition("[")[0]


def changed_at(file: Path) -> float:
    """Return when a file was changed: at its last commit, or now if it differs from that. 0.0 without git."""

    def git(*command: str) -> str:
        try:
            return subprocess.run(
                ["git", *command, "--", file.name], cwd=file.parent, capture_output=True, text=True
            ).stdout.strip()
        except OSError:
            return ""

    return time.time() if git("status", "--porcelain") else float(git("log", "-1", "--format=%ct") or 0.0)


def part_of(
    groups: Sequence[Sequence[str]], table: Table, codes: Mapping[str, str], changed: Mapping[str, float]
) -> list[str]:
    """Return the tests to run: the ones that changed, then the ones that have waited longest.

    `groups`: the tests of the tier; the tests of a group share a fixture and stay together. `codes`: the
    present digest of each test; `changed`: when each file was changed. What has changed last comes first, of
    the tests that failed or of which a run of another version is known. Tests without a run have waited
    longest. The part is as long as the mean, and at most one group longer.
    """
    runs = {test: table.get(test, Run(UNKNOWN_S, "", ESTIMATED)) for group in groups for test in group}
    size = sum(run.seconds for run in runs.values()) / PARTS

    def waited(group: Sequence[str]) -> tuple[bool, float, tuple[str, bool]]:
        known = [(table[test].code, codes[test]) for test in group if test in table]
        failed = any(runs[test].outcome == FAILED for test in group)
        other = failed or any(before not in ("", now) for before, now in known)
        return (
            not other,
            -changed[file_of(group[0])] if other else 0.0,
            min((runs[test].at, test in table) for test in group),
        )

    part: list[str] = []
    for group in sorted(groups, key=waited):
        if part and sum(runs[test].seconds for test in part) >= size:
            break
        part += group
    return part


def updated(
    table: Table, runs: Table, collected: Sequence[str], places: Sequence[str], slow: bool = False
) -> dict[str, Run]:
    """Return the table after a session. `collected`: all nightly tests in `places`. `slow`: the machine is
    slower than the table's, so the seconds of another version of a test say more than the ones of this run.
    """
    merged = dict(table)
    for test, run in runs.items():
        before = table.get(test)
        if before is not None and before.outcome == run.outcome and (slow or before.code == run.code):
            run = run._replace(seconds=min(before.seconds, run.seconds))
        merged[test] = run
    tests = {*collected}
    return {test: run for test, run in merged.items() if test in tests or not _within(test, places)}


def _within(test: str, places: Sequence[str]) -> bool:
    return any(
        test == place or test.startswith(tuple(place + end for end in ("/", "::", "["))) for place in places
    )


def group_of(item: pytest.Item) -> tuple[str, str]:
    """Return what tests have in common that share fixtures of their module: the file, and the parameters."""
    file = file_of(item.nodeid)
    definitions = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009  pytest has no public name for it
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    shared = {
        name: parameters.get(name)
        for name, (*_, definition) in sorted(definitions.items())
        if definition.scope == "module" and definition.baseid == file
    }
    return file, repr(shared) if shared else item.nodeid


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
        action="store_true",
        help="the named nightly tests, or a tenth: the changed ones, then the ones that have waited longest",
    )
    parser.addoption(
        "--slow-machine",
        action="store_true",
        help="--nightly-part keeps the seconds of tests that passed before",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--nightly-part"):
        config.pluginmanager.register(_Session(config), "nightly-session")


class _Session:
    """Selects a part, notes its runs, and writes and shows the table."""

    def __init__(self, config: pytest.Config) -> None:
        self._root, self._path = config.rootpath, config.rootpath / TABLE
        self._slow = bool(config.getoption("--slow-machine"))
        self._collected: list[str] = []
        self._places: list[str] = []
        self._codes: dict[str, str] = {}
        self._at = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ")
        self._noted: set[str] = set()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._outcomes: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        self._collected = [item.nodeid for item in nightly]
        self._codes = digests_of(self._collected, self._root)
        part = {*self._collected}
        whole = config.args_source is not pytest.Config.ArgsSource.ARGS
        narrowed = config.getoption("keyword") or config.getoption("markexpr") not in ("", "nightly")
        if not narrowed:
            self._places = [TABLE.parent.name] if whole else [arg.rstrip("/") for arg in config.args]
        if whole and not narrowed:
            groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
            for item in nightly:
                groups[group_of(item)].append(item.nodeid)
            changed = {file: changed_at(self._root / file) for file in {*map(file_of, self._collected)}}
            part = {*part_of([*groups.values()], read_table(self._path), self._codes, changed)}
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

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write the table after each test, so that a session that is killed has noted the others."""
        if nodeid in self._outcomes:
            self._write()

    def _write(self) -> Table:
        runs = {
            test: Run(self._seconds[test], self._at, outcome, self._codes[test])
            for test, outcome in self._outcomes.items()
        }
        table = updated(read_table(self._path), runs, self._collected, self._places, self._slow)
        write_table(table, self._path)
        return table

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._outcomes:
            return
        table = self._write()
        terminalreporter.section("nightly tier")
        for line in lines_of(table, self._outcomes):
            terminalreporter.write_line(line)


def exists(test: str, repository: Path) -> bool:
    """Return whether a file still defines the function of a test."""
    path = repository / file_of(test)
    return path.is_file() and f"def {function_of(test)}(" in path.read_text(encoding="utf-8")


if __name__ == "__main__":
    kept = {test: run for test, run in read_table(TABLE).items() if exists(test, Path())}
    write_table(kept, TABLE)
