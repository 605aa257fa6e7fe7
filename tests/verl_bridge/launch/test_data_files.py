# SPDX-License-Identifier: Apache-2.0
"""Data that a run could not use is one line for each fault, before Ray starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recipe.async_pipeline.lab.tasks.data import write_rows
from tests.verl_bridge.launch.conftest import Problems

pytestmark = pytest.mark.real_engine
ROW = {
    "prompt": [{"role": "user", "content": "1+1="}],
    "data_source": "sums",
    "reward_model": {"ground_truth": "2"},
}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"train_batch_size": 5000},
            "must have at least data.train_batch_size=5000 rows, .*, got 4096; lower",
        ),
        ({"train_max_samples": 15}, "must have at least data.train_batch_size=16 rows, .* got 15"),
        ({"train_files": ["{}/train.parquet", "{}/val.parquet"], "train_max_samples": 4097}, ""),
        ({"train_files": "{}/*.parquet"}, ""),
        ({"train_files": "{}"}, "must end in .parquet, .json, .jsonl, got "),
        ({"train_files": []}, r"must be a file or a list of files, got \[\]; name at least one"),
        ({"train_files": "hdfs://far/away.parquet", "train_batch_size": 5000}, ""),
        (
            {"prompt_key": "prompts"},
            r"prompt_key must be a column of data.train_files, got 'prompts' \(did you",
        ),
        ({"train_files": "{}/odd/array.json", "prompt_key": "prompts"}, "'prompts' .did you mean 'prompt'"),
        (
            {"train_files": "{}/odd/texts.parquet"},
            "a column of lists of messages, got 'prompt', which has",
        ),
        (
            {"train_files": "{}/odd/texts.jsonl"},
            "a column of lists of messages, got 'prompt', which has",
        ),
        ({"train_files": "anything", "custom_cls.path": "pkg://mine", "custom_cls.name": "Mine"}, ""),
    ],
)
def test_data_is_read_as_verl_would(
    problems: Problems, tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    task = str(tmp_path / "task")
    Path(task, "odd").mkdir()
    texts = [ROW | {"prompt": "1+1="}] * 16
    write_rows(texts, Path(task, "odd", "texts.parquet"))
    Path(task, "odd", "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    Path(task, "odd", "array.json").write_text(json.dumps([ROW] * 16))
    filled = {
        f"data.{key}": json.loads(json.dumps(value).replace("{}", task)) for key, value in changes.items()
    }
    if batch := changes.get("train_batch_size"):
        filled |= {"actor_rollout_ref.actor.ppo_mini_batch_size": batch}
    found = [problem for problem in problems(filled) if "data." in problem.partition(" ")[0]]
    assert bool(found) == bool(line)
    assert not line or re.search(line, found[0])


def test_pictures_in_the_data_need_the_package_that_reads_them(
    problems: Problems, tmp_path: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that takes pictures is trained without it on text alone."""
    model, data = tmp_path / "task" / "model", tmp_path / "seen.parquet"
    write_rows([ROW | {"images": [{"bytes": b"png", "path": None}]}] * 16, data)
    seen = {"data.train_files": str(data)}
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert not problems(seen)
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(described | {"vision_config": {"depth": 2}}))
    assert not problems({})
    (line,) = problems(seen)
    assert line.startswith(
        "data.train_files must have no pictures where qwen_vl_utils cannot be imported, got the column "
        "'images' in "
    )
    assert not problems(seen | {"data.image_key": "pictures"})
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    assert not problems(seen)
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop"
    told = f"{loop} must be one of verl's for prompts with "
    played, environment = (
        {loop: "environment"},
        {"trainer.v1.async_pipeline.agentic.environment": "frozen_lake"},
    )
    assert not problems(seen | played | environment)
    lines = problems(seen | {loop: "agent_session"})
    assert any(line.startswith(f"{told}images and videos, got 'agent_session'") for line in lines)
    write_rows([ROW | {"videos": [{"bytes": b"mp4", "path": None}]}] * 16, data)
    assert not problems(seen)
    (line,) = problems(seen | played | environment)
    assert line.startswith(f"{told}videos, got 'environment' with the column 'videos' in ")


def test_rows_of_json_are_counted_and_damage_is_named(problems: Problems, tmp_path: Path) -> None:
    lines = [json.dumps(ROW)] * 16
    good, few, array = tmp_path / "good.jsonl", tmp_path / "few.jsonl", tmp_path / "array.json"
    good.write_text("\n".join(lines) + "\n\n")
    few.write_text("\n".join(lines[1:]))
    array.write_text(json.dumps([ROW] * 16))
    assert not problems({"data.train_files": str(good)}) and not problems({"data.train_files": str(array)})
    assert "got 15; lower" in problems({"data.train_files": str(few)})[0]

    whole = (tmp_path / "task" / "train.parquet").read_bytes()
    (tmp_path / "half.parquet").write_bytes(whole[: len(whole) // 2])
    good.write_text("{not json\n")
    for name in ("half.parquet", "good.jsonl"):
        (problem,) = problems({"data.train_files": str(tmp_path / name)})
        assert problem.startswith(f"data.train_files cannot be read: {tmp_path / name}: ")
    good.write_text("\n".join(lines * 40)[:-5])
    (problem,) = problems({"data.train_files": str(good)})
    assert "its last line is not JSON" in problem


def test_an_empty_validation_is_refused(problems: Problems, tmp_path: Path) -> None:
    write_rows([ROW], tmp_path / "val.parquet")
    assert not problems({"data.val_files": str(tmp_path / "val.parquet")})
    (tmp_path / "val.jsonl").write_text("")
    (problem,) = problems({"data.val_files": str(tmp_path / "val.jsonl")})
    assert problem == "data.val_files must have a row, got 0; validate on other data"


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"data_source": "openai/gsm8k"}, ""),
        (
            {"data_source": "my/task"},
            "data.train_files must have data sources that verl's reward function knows, got 'my/task'; set "
            "reward.custom_reward_function.path",
        ),
        ({"data_source": "my/task", "agent_name": "my_loop"}, ""),
    ],
)
def test_verls_reward_function_knows_the_data(
    problems: Problems, tmp_path: Path, row: dict[str, Any], line: str
) -> None:
    write_rows([ROW | row] * 16, tmp_path / "train.parquet")
    validated = {"trainer.test_freq": -1, "trainer.val_before_train": False}
    changes = {"data.train_files": str(tmp_path / "train.parquet"), **validated}
    assert not problems(changes), "the run has a reward function"
    assert problems(changes | {"reward.custom_reward_function.path": None}) == ((line,) if line else ())


def test_all_data_sources_without_a_scorer_are_named(problems: Problems, tmp_path: Path) -> None:
    rows = [ROW | {"data_source": name} for name in ("my/first", "my/second")]
    write_rows(rows * 8, tmp_path / "train.parquet")
    changes = {
        "data.train_files": str(tmp_path / "train.parquet"),
        "reward.custom_reward_function.path": None,
    }
    (problem, *_) = problems(changes)
    assert "got 'my/first', 'my/second'; set reward.custom_reward_function.path" in problem


@pytest.mark.parametrize("column", ["data_source", "reward_model"])
def test_what_reward_managers_read_is_there(problems: Problems, tmp_path: Path, column: str) -> None:
    write_rows(
        [{name: value for name, value in ROW.items() if name != column}] * 16, tmp_path / "few.parquet"
    )
    changes = {"data.train_files": str(tmp_path / "few.parquet")}
    needed = f"data.train_files must have the column {column}, which verl's reward managers read, got none; "
    assert problems(changes) == (f"{needed}add it",)
    if column == "data_source":
        alone = {**changes, "reward.custom_reward_function.path": None, "trainer.test_freq": -1}
        found = problems(alone | {"trainer.val_before_train": False})
        assert found == (f"{needed}set reward.custom_reward_function.path, and add the column",)
    own = {"reward.reward_manager.source": "importlib", "reward.reward_manager.module.path": "/mine.py"}
    assert not any("must have the column" in line for line in problems(changes | own))
