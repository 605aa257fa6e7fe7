# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for a session in a lane: live lines, and a record that `tests.lanes` reads.

The record has a JSON object in each line, flushed at once: `start` of a test, `failure` of a test (`test` and
the text), `error` of a collector, `test` with its `outcome` and `seconds` at its end, and last `end` with the
status of the session: a process that exits before that has not run all tests.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Generator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.processes import end_with_parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, metavar="FILE", help="write what happens to FILE, and live lines")
    parser.addoption(
        "--live", choices=("tests", "files"), default="tests", help="what each live line is the start of"
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--record")
    if path is not None:
        # Without the process that reads its lines, the session would run until its end, unseen.
        end_with_parent()
        config.pluginmanager.register(_Recorder(config, path), "live-recorder")


class _Recorder:
    """Replaces the letters of pytest by live lines, and writes the record."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._by_file = config.getoption("--live") == "files"
        self._terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
        self._file = path.open("a", encoding="utf-8")
        self._shown = ""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(start=nodeid)
        subject = nodeid.partition("::")[0] if self._by_file else nodeid
        if subject != self._shown:
            self._shown = subject
            self._show(subject)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Generator[None, Any, Any]:
        category, _, _ = yield
        return category, "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            text = _text_of(report)
            self._outcomes[report.nodeid] = "failed"
            self._write(test=report.nodeid, failure=text)
            self._show(f"FAILED {report.nodeid}\n{text}")
        elif report.when == "call" or report.skipped:
            self._outcomes.setdefault(report.nodeid, report.outcome)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome, seconds = self._outcomes.pop(nodeid, "failed"), self._seconds.pop(nodeid, 0.0)
        self._write(test=nodeid, outcome=outcome, seconds=round(seconds, 3))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(error=report.nodeid)
            self._show(f"ERROR {report.nodeid}\n{_text_of(report)}")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(end=int(exitstatus))

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()

    def _show(self, text: str) -> None:
        self._terminal.write_line(f"{datetime.now():%H:%M:%S} {text}")
        self._terminal.flush()


def _text_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the failure as pytest prints it, with the output that was captured."""
    captured = [f"--- {title} ---\n{content}" for title, content in report.sections if content]
    return "\n".join([report.longreprtext, *captured])
