# SPDX-License-Identifier: Apache-2.0
"""The parquet files that verl reads: one row per sum, in verl's columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipe.async_pipeline.lab.tasks.task import Problem
from recipe.async_pipeline.lab.tasks.tokenizer import prompt_messages

DATA_SOURCE = "async_pipeline/addition"


def make_row(problem: Problem, index: int, split_name: str, data_source: str = DATA_SOURCE) -> dict[str, Any]:
    """Return one row: the chat prompt, the ground truth, and the row's index in its file."""
    return {
        "data_source": data_source,
        "prompt": prompt_messages(problem),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index, "split": split_name},
    }


def write_parquet(problems: Sequence[Problem], split_name: str, path: Path) -> None:
    """Write one row per problem, in the given order. Replaces `path`."""
    rows = [make_row(problem, index, split_name) for index, problem in enumerate(problems)]
    write_rows(rows, path)


def write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows in the given order. Replaces `path`."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
