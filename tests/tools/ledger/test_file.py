# SPDX-License-Identifier: Apache-2.0
"""A ledger file that is damaged is a violation and no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.tools.ledger.file import audit_file
from tests.fakes.ledgers import whole


def test_invalid_lines_are_violations_instead_of_errors(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    lines = [json.dumps(record) for record in whole()]
    file.write_text("\n".join([*lines[:7], "[" * 200_000, *lines[8:]]) + "\n")
    assert "line 8 is incomplete" in audit_file(file).violations
    file.write_bytes(b"\xff\xfe" * 2000)
    assert audit_file(file).violations == ["the ledger has no whole record"]


def test_a_run_that_never_began_says_why(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"status": "failed", "error": "ValueError: mine"}')
    with pytest.raises(ConfigError, match=r"it ended \(failed\) before it began: ValueError: mine$"):
        audit_file(tmp_path)


def test_an_incomplete_line_between_others_is_a_violation(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    lines = [json.dumps(record) for record in whole()]
    file.write_text("\n".join([*lines[:7], lines[7][:10], *lines[8:]]) + "\n")
    found = audit_file(file)
    assert any(text == "line 8 is incomplete" for text in found.violations)


def test_a_missing_first_or_last_record_is_named(tmp_path: Path) -> None:
    file, lines = tmp_path / "ledger.jsonl", [json.dumps(record) + "\n" for record in whole()]
    file.write_text("".join(lines[1:]))
    found = audit_file(tmp_path)
    assert found.violations[0] == "the first record is missing, which opens the ledger"
    assert not any("None" in text for text in found.violations)
    file.write_text("".join(lines[:-1]))
    assert audit_file(tmp_path).ok, "a killed run has no end record"
    (tmp_path / "summary.json").write_text('{"status": "completed"}')
    assert audit_file(tmp_path).violations == [
        "summary.json says that the run completed, but the ledger has no end record; its last records are "
        "missing"
    ]
