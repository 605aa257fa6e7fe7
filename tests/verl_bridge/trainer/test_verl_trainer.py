# SPDX-License-Identifier: Apache-2.0
"""Nothing that a reward function returns, and no file of generations, ends a validation."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.observe.observers import Observers

pytestmark = pytest.mark.real_engine

COLUMNS: dict[str, list[Any]] = {"reward": [0.5, 1.0], "nested": [{"a": 1}, {"a": 2}], "sets": [{1}, {2}]}


@pytest.fixture
def trainer(module: ModuleType) -> Any:
    trainer = object.__new__(module.VerlTrainer)
    trainer.pipeline = SimpleNamespace(
        observers=Observers(lambda line: None), runtime=SimpleNamespace(started_unix=0.0)
    )
    trainer.global_steps = 3
    trainer._init_dump_executor()
    return trainer


def test_metrics_of_a_validation_are_made_of_numbers(trainer: Any) -> None:
    found = trainer._val_metrics_update(["s", "s"], ["u", "u"], COLUMNS, [])
    assert {name.split("/")[2] for name in found} == {"reward"}


def test_a_file_of_generations_takes_any_value_and_may_fail(trainer: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("generations", "file"):
        trainer._dump_generations(["a"] * 2, ["b"] * 2, [{1}] * 2, [0.5] * 2, COLUMNS, str(tmp_path / folder))
    trainer._shutdown_dump_executor()
    rows = [json.loads(line) for line in (tmp_path / "generations" / "3.jsonl").read_text().splitlines()]
    assert [row["sets"] for row in rows] == ["{1}", "{2}"]
