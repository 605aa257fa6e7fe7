# SPDX-License-Identifier: Apache-2.0
"""The parquet rows: verl's columns, and prompts that give the same token ids as in the warm-up."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.async_pipeline.lab.tasks.data import DATA_SOURCE, make_row, write_parquet
from recipe.async_pipeline.lab.tasks.task import Problem, TaskSpec, split_problems
from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer, prompt_ids
from recipe.async_pipeline.lab.tasks.warmup import IGNORED, encode_example

PROBLEMS = split_problems(TaskSpec(max_operand=14, num_val=3), seed=0).train


def test_a_row_has_the_columns_that_verl_reads() -> None:
    assert make_row(Problem(12, 34), 7, "train") == {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": "12+34="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "46"},
        "extra_info": {"index": 7, "split": "train"},
    }


@pytest.mark.slow
def test_rows_are_stored_in_order(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write_parquet(PROBLEMS, "train", tmp_path / "train.parquet")
    rows = parquet.read_table(tmp_path / "train.parquet").to_pylist()
    assert rows == [make_row(problem, index, "train") for index, problem in enumerate(PROBLEMS)]


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet")
    for name in ("a", "b"):
        split = split_problems(TaskSpec(max_operand=14, num_val=3), seed=3)
        write_parquet(split.train, "train", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.real_engine
def test_prompt_ids_of_data_and_warm_up_are_equal(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("transformers")
    tokenizer = make_tokenizer()
    write_parquet(PROBLEMS, "train", tmp_path / "train.parquet")
    for problem, row in zip(
        PROBLEMS, parquet.read_table(tmp_path / "train.parquet").to_pylist(), strict=True
    ):
        ids, labels = encode_example(tokenizer, problem, problem.answer)
        prompt = prompt_ids(tokenizer, row["prompt"])
        assert ids[: len(prompt)] == prompt and labels[: len(prompt)] == [IGNORED] * len(prompt)
