# SPDX-License-Identifier: Apache-2.0
"""The directory of the calculator has data, a model and a tool; verl loads its rule by path."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from recipe.async_pipeline.lab.tasks.build import ensure_toy
from recipe.async_pipeline.lab.tasks.calculator_task.calculator import CalculatorTask
from recipe.async_pipeline.lab.tasks.calculator_task.calculator_build import (
    DATA_SOURCE,
    REWARD_FILE,
    TOOLS,
    CalculatorSpec,
)
from recipe.async_pipeline.lab.tasks.model import ModelSpec
from recipe.async_pipeline.lab.tasks.warmup import WarmupSpec

SMALL = CalculatorSpec(
    task=CalculatorTask(num_train=6, num_val=4),
    model=ModelSpec(num_layers=1, hidden_size=32, intermediate_size=32),
    warmup=WarmupSpec(
        taught_accuracy=0.0, num_slip_steps=1, max_slip_steps=1, batch_size=2, check_every=1, min_accuracy=0.0
    ),
)


def test_the_rows_are_the_task_s_sums(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    SMALL.write_data(tmp_path)
    rows = parquet.read_table(tmp_path / "val.parquet").to_pylist()
    held_out = SMALL.task.problems(SMALL.seed)[1]
    lengths = ["long" if len(problem.prompt) == 10 else "short" for problem in held_out]
    assert [row["data_source"] for row in rows] == [f"{DATA_SOURCE}_{length}" for length in lengths]
    assert set(lengths) == {"short", "long"}
    assert [row["prompt"][0]["content"] for row in rows] == [problem.prompt for problem in held_out]
    assert [row["reward_model"]["ground_truth"] for row in rows] == [one.answer for one in held_out]


def test_other_parameters_make_another_directory() -> None:
    assert len({one.dir_name for one in (CalculatorSpec(), CalculatorSpec(seed=1), SMALL)}) == 3


@pytest.mark.real_engine
def test_it_is_made_once_with_its_tool_and_reward(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    made = ensure_toy(SMALL, tmp_path, report=lambda line: None)
    assert all(Path(str(made.as_dict()[name])).exists() for name in ("model", "train", "val", "reward"))
    assert (made.dir / "tools.py").read_text() == TOOLS.read_text()
    assert ensure_toy(SMALL, tmp_path, report=lambda line: None) == made


def test_it_runs_alone() -> None:
    loaded = runpy.run_path(str(REWARD_FILE))
    assert loaded["compute_score"]("", "[12+34]\n46>46", "46")["score"] == 0.8
