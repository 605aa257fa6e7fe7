# SPDX-License-Identifier: Apache-2.0
"""The directory of the lake: rows with a seed, and a name that tells the parameters apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.async_pipeline.lab.tasks.build import ToySpec, ensure_toy
from recipe.async_pipeline.lab.tasks.lake_task.lake import LakeTask
from recipe.async_pipeline.lab.tasks.lake_task.lake_build import LakeSpec, lake_rows
from recipe.async_pipeline.lab.tasks.model import ModelSpec
from recipe.async_pipeline.lab.tasks.warmup import WarmupSpec

pytest.importorskip("gymnasium")
SMALL = LakeSpec(
    task=LakeTask(num_train=6, num_val=4),
    model=ModelSpec(num_layers=1, hidden_size=32, intermediate_size=32),
    warmup=WarmupSpec(
        taught_accuracy=0.0, num_slip_steps=1, max_slip_steps=1, batch_size=2, check_every=1, min_accuracy=0.0
    ),
)


def test_a_row_has_the_seed_of_its_board() -> None:
    first, second = lake_rows(range(7, 9), "train")
    assert first["extra_info"] == {"index": 0, "split": "train", "seed": 7}
    assert second["extra_info"]["seed"] == 8
    assert first["prompt"] == [{"role": "user", "content": ""}], "the environment makes the rest of it"


def test_other_parameters_make_another_directory() -> None:
    names = {
        spec.dir_name
        for spec in (LakeSpec(), LakeSpec(seed=1), LakeSpec(task=LakeTask(size=5)), SMALL, ToySpec())
    }
    assert len(names) == 5


@pytest.mark.real_engine
def test_it_is_made_once_and_has_no_reward_rule(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    said: list[str] = []
    made = ensure_toy(SMALL, tmp_path, report=said.append)
    assert "reward" not in made.as_dict()
    assert all(Path(str(made.as_dict()[name])).exists() for name in ("model", "train", "val"))
    count = len(said)
    assert ensure_toy(SMALL, tmp_path, report=said.append) == made and len(said) == count
