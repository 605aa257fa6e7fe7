# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline ledger`: its output and its status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.async_pipeline.cli import main
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.observe.run_directory.agent_output import (
    FOLDER,
    MAX_FILES,
    AgentOutputFolder,
    FailedAttempt,
)
from recipe.async_pipeline.tools.ledger.file import audit_file
from tests.fakes.ledgers import resumed, trained_again, whole, write


def test_a_consistent_ledger_gives_status_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "ledger.jsonl", [*whole()])
    assert main.main(["ledger", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "10 dispatched = 8 trained + 1 filtered + 1 expired + 0 failed + 0 in flight" in out
    assert "ok           every prompt has one fate" in out
    assert main.main(["ledger", str(tmp_path / "ledger.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_a_violation_gives_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "ledger.jsonl", [*trained_again(whole())])
    assert main.main(["ledger", str(file)]) == 1
    assert "VIOLATION    prompt p1.0 is trained in step 2, but was trained before" in capsys.readouterr().out


def test_a_run_that_ended_before_its_first_record_is_consistent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ledger.jsonl").touch()
    assert main.main(["ledger", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "run          ended before its first step; its ledger has no record\n"
    (tmp_path / "metrics.jsonl").write_text("{}\n", encoding="utf-8")
    assert main.main(["ledger", str(tmp_path)]) == 1, "a run with steps has records"


def test_a_missing_ledger_gives_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["ledger", str(tmp_path)]) == 2
    assert "ledger.jsonl does not exist" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        audit_file(tmp_path)


def test_a_killed_and_resumed_run_is_consistent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kill leaves an incomplete line."""
    before, after = resumed()
    file = write(tmp_path / "ledger.jsonl", [*before])
    with file.open("a") as lines:
        lines.write('{"n": 77, "kind": "disp')
    found = audit_file(tmp_path)
    assert (found.ok, found.status) == (True, "running")
    with file.open("a") as lines:
        lines.write("\n" + "".join(f"{json.dumps(record)}\n" for record in after))
    assert main.main(["ledger", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    void = len(before) - (after[0]["n"] - 1)
    assert f"completed after step 6, resumed once; {void} records are void" in out


def test_a_run_resumed_twice_from_one_checkpoint_counts_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The records of the first resume are void, but it counts as a resume."""
    before, after = resumed()
    file = write(tmp_path / "ledger.jsonl", [*before, *after[:3], *after])
    assert main.main(["ledger", str(file)]) == 0
    assert "completed after step 6, resumed 2 times; " in capsys.readouterr().out


def test_a_ledger_that_continues_another_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, after = resumed()
    write(tmp_path / "ledger.jsonl", [*after])
    assert main.main(["ledger", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "completed after step 6, resumed once" in out
    assert " trained; earlier steps are in another ledger; " in out


def test_repeated_episodes_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = whole()
    for place, record in enumerate(records):
        if record["kind"] == "finished" and record["uid"] == "p1.0":
            record["trajectories"][0] |= {"attempts": 2, "end": "turns"}
            records[place] = {**record, "redundant": 3}
    file = write(tmp_path / "ledger.jsonl", [*records])
    assert main.main(["ledger", str(file)]) == 0
    out = capsys.readouterr().out
    assert (
        "prompts were generated again, 1 failed episodes were repeated, 3 redundant episodes were ended"
        in out
    )
    assert "episodes     ended early: 1 turns" in out


def test_failed_attempts_are_counted_with_their_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "ledger.jsonl", [*whole()])
    reasons = [("agent_failed", "no sandbox"), ("agent_failed", "a bug"), ("agent_failed", "no sandbox")]
    failed = [
        FailedAttempt(f"u_{i}", 1, end, why, "")
        for i, (end, why) in enumerate([*reasons, ("deadline", "30 s")])
    ]
    AgentOutputFolder(tmp_path).add(1, failed)
    for given in (tmp_path, file):
        assert main.main(["ledger", str(given)]) == 0
        lines = capsys.readouterr().out.splitlines()
        at = lines.index(f"attempts     4 failed; see {tmp_path / FOLDER}")
        assert lines[at + 1 : at + 3] == [
            "             3 agent_failed, 2 of them: no sandbox",
            "             1 deadline, 1 of them: 30 s",
        ]

    AgentOutputFolder(tmp_path).add(
        2, [FailedAttempt(f"v_{i}", 1, "deadline", "", "") for i in range(MAX_FILES)]
    )
    assert main.main(["ledger", str(tmp_path)]) == 0
    assert (
        f"{MAX_FILES} failed; see {tmp_path / FOLDER}; the newest {MAX_FILES} are kept"
        in capsys.readouterr().out
    )
