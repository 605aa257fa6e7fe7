# SPDX-License-Identifier: Apache-2.0
"""No value that a reward function returns ends a validation."""

from __future__ import annotations

import json
import os
import time
from datetime import date
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from recipe.async_pipeline.observe.observers import Observers
from tests.conftest import Load

pytestmark = pytest.mark.real_engine

COLUMNS: dict[str, list[Any]] = {
    "reward": [0.5, 1.0],
    "acc": [True, np.bool_(False)],
    "decimal": [Decimal("0.5"), Fraction(1, 2)],
    "array": [np.array(1), np.float16(2)],
    "missing": [None, 3],
    "pred": ["46", "47"],
    "nested": [{"a": 1}, {"a": 2}],
    "ragged": [[1, 2], [3]],
    "mixed": [1.0, "high"],
    "late text": [None, date(2026, 1, 2)],
    "sets": [{1}, {2}],
    "complex": [1j, np.complex64(1)],
    "large": [10**400, 1],
}


def test_verl_makes_metrics_of_numbers_of_any_kind_and_of_nothing_else(
    module: ModuleType, load: Load
) -> None:
    metrics = load("verl.trainer.ppo.metric_utils").process_validation_metrics
    found = metrics(["s", "s"], ["u", "u"], module.numbers_or_text(COLUMNS))["s"]
    assert found.keys() == {"reward", "acc", "decimal", "array", "missing"}
    assert [found[name]["mean@2"] for name in ("acc", "decimal", "array")] == [0.5, 0.5, 1.5]
    assert found["missing"] == {"mean@1": 3.0}


def test_every_value_fits_into_a_line_of_a_file(module: ModuleType) -> None:
    for name, values in COLUMNS.items():
        assert len(json.loads(json.dumps(module.for_json(values)))) == 2, name
    assert module.for_json([np.array([1, 2]), {"a": 1}, {1}, {(1, 2): 3}]) == [
        [1, 2],
        {"a": 1},
        "{1}",
        "{(1, 2): 3}",
    ]


def test_a_file_of_generations_takes_any_value_and_ends_no_run(
    module: ModuleType, load: Load, tmp_path: Path
) -> None:
    verl = load("verl.trainer.ppo.v1.trainer_base").PPOTrainer
    said: list[str] = []
    folder = tmp_path / "generations"
    verls, started_unix = vars(verl)["_write_generations"].__func__, time.time()
    write = module.file_writer(Observers(said.append), verls, str(folder), started_unix)
    folder.mkdir()
    (folder / "3.jsonl").write_text("of an earlier run\n")
    os.utime(folder / "3.jsonl", (0, started_unix - 1))
    for _ in range(2):
        write(["a", "b"], ["c", "d"], [{1}, Decimal(1)], [0.5, 1.0], COLUMNS, 3)
    assert [path.name for path in sorted(folder.iterdir())] == ["3.1.jsonl", "3.jsonl"]
    rows = [json.loads(line) for line in (folder / "3.jsonl").read_text().splitlines()]
    assert [row["gts"] for row in rows] == ["{1}", "1"]
    assert rows[0].keys() >= COLUMNS.keys() and rows[1]["array"] == 2.0
    assert said == []

    (folder / "4.jsonl").mkdir()
    write(["a"], ["c"], [None], [0.5], {}, 4)
    assert said[0].startswith(f"the files in {folder} failed: IsADirectoryError: ")
