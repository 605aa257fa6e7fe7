# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline replicas`, with a stand-in for the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.cli import replicas
from recipe.async_pipeline.cli.main import main

LIST = {
    "max_replicas": 0,
    "replicas": [
        {"name": "replica 0", "node": "10.0.0.1", "state": "serving", "version": 7, "open_requests": 3,
         "load_s": 0.25, "why": ""},
        {"name": "replica 1", "node": "", "state": "fenced", "version": None, "open_requests": None,
         "load_s": None, "why": "WaitTimeout: it hangs"},
    ],
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The requests that the run got; it answers each."""
    found: list[dict[str, Any]] = []

    def ask(run_dir: Path, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        found.append(request)
        if request["action"] == "add":
            return {"added": ["replica 2"], **LIST} if request["count"] == 1 else {"error": "they do not fit"}
        return {"removed": request["name"], **LIST} if request["action"] == "remove" else dict(LIST)

    monkeypatch.setattr(replicas, "ask", ask)
    return found


def test_the_list(asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replicas", "run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "name       node      state    version  open requests  load",
        "replica 0  10.0.0.1  serving  7        3              0.25 s",
        "replica 1            fenced   -        -              -",
        "replica 1: WaitTimeout: it hangs",
    ]
    assert main(["replicas", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == LIST
    assert asked == [{"action": "list"}] * 2


def test_one_is_added_or_removed(asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replicas", "run", "--add", "1"]) == 0
    assert capsys.readouterr().out.startswith("replica 2 is starting\n")
    assert main(["replicas", "run", "--remove", "replica 1"]) == 0
    assert capsys.readouterr().out.startswith("replica 1 finishes its open requests and ends\n")
    assert asked == [{"action": "add", "count": 1}, {"action": "remove", "name": "replica 1"}]


def test_a_refusal_is_one_line(asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replicas", "run", "--add", "9"]) == 1
    assert capsys.readouterr().err == "async-pipeline replicas: they do not fit\n"


def test_no_run_is_a_users_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replicas", str(tmp_path)]) == 2
    assert "has no run that takes requests" in capsys.readouterr().err
