# SPDX-License-Identifier: Apache-2.0
"""The measurement of attention without flash-attn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.async_pipeline.cli.main import main

pytestmark = pytest.mark.real_engine


def test_both_kinds_of_attention_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    size = ["--tokens", "64", "--sequences", "3", "--turns", "2"]
    assert main(["bench", "attention", *size, "--json", str(out)]) == 0

    data = json.loads(out.read_text())
    assert {name: len(taken) for name, taken in data["cpu_s"].items()} == {"sdpa": 2, "packed_sdpa": 2}
    assert all(seconds > 0 for taken in data["cpu_s"].values() for seconds in taken)
    printed = capsys.readouterr().out
    assert "| packed_sdpa |" in printed and "times as much" in printed


@pytest.mark.parametrize(("tokens", "sequences", "turns"), [(8, 0, 1), (8, 4, 0), (8, 5, 1)])
def test_sizes_that_are_no_batch_are_one_line(
    tokens: int, sequences: int, turns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--tokens", str(tokens), "--sequences", str(sequences), "--turns", str(turns)]
    assert main(["bench", "attention", *sizes]) == 2
    assert f"got {sequences}, {turns} and {tokens}" in capsys.readouterr().err
