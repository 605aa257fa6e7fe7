# SPDX-License-Identifier: Apache-2.0
"""An engine is loaded and generates; a response that is too short is a failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from recipe.async_pipeline.verl_bridge import engine_check
from recipe.async_pipeline.verl_bridge.engine_check import NEW_TOKENS, main


def options(folder: Path, model: str, ranks: int) -> list[str]:
    chosen = ["--engine", "vllm", "--model", model, "--ranks", str(ranks), "--device", "cpu"]
    return [*chosen, "--json", str(folder / "found.json")]


@pytest.mark.parametrize(("length", "status"), [(NEW_TOKENS, 0), (NEW_TOKENS - 1, 1)])
def test_the_status_says_whether_it_generates(
    length: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, str]] = []

    def engine(model: str, ranks: int, device: str) -> Callable[[], list[int]]:
        asked.append((model, ranks, device))
        return lambda: [7] * length

    monkeypatch.setattr(engine_check, "ENGINES", {"vllm": engine})
    assert main(options(tmp_path, "/model", 2)) == status
    assert asked == [("/model", 2, "cpu")]
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["tokens"] == [length, length] and found["load_s"] >= 0
