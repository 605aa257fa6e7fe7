# SPDX-License-Identifier: Apache-2.0
"""The policy of the look task reads pictures with a real processor, and learns from them."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.lab.tasks.look_task import look_model
from recipe.async_pipeline.lab.tasks.look_task.look import CELL, Look, LookTask
from recipe.async_pipeline.lab.tasks.look_task.look_model import LookModelSpec, VisionSpec
from recipe.async_pipeline.lab.tasks.look_task.look_warmup import LookWarmup
from recipe.async_pipeline.lab.tasks.warmup import IGNORED, WarmupSpec

pytestmark = pytest.mark.real_engine
TINY = LookModelSpec(num_layers=1, hidden_size=32, intermediate_size=32, vision=VisionSpec(depth=1))
SHORT = WarmupSpec(num_slip_steps=1, batch_size=4, check_every=1, num_checked=4, max_taught_steps=2)


@pytest.fixture(scope="module")
def processor() -> Any:
    return look_model.make_processor()


@pytest.fixture
def warmup(processor: Any) -> LookWarmup:
    model = look_model.make_look_model(TINY, processor.tokenizer, seed=0)
    pictures = LookTask(num_train=16, num_val=4).pictures(0)
    return LookWarmup(pictures, processor, model, SHORT, seed=0, report=lambda _: None)


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (4, 4), (4, 6)])
def test_four_cells_are_one_token(warmup: LookWarmup, processor: Any, rows: int, columns: int) -> None:
    picture = Look("red", "box", (0,), 0, rows=rows, columns=columns)
    inputs = warmup.asked([picture])
    assert inputs["image_grid_thw"].tolist() == [[1, rows, columns]]
    text = processor.tokenizer.decode(inputs["input_ids"][0])
    tokens = rows * columns // 4
    assert text == f"<|vision_start|>{'<|image_pad|>' * tokens}<|vision_end|>what?"
    assert inputs["pixel_values"].shape == (rows * columns, 3 * 2 * CELL * CELL)


def test_only_answers_are_labelled(warmup: LookWarmup, processor: Any) -> None:
    inputs, labels = warmup.batch(0.0)
    assert inputs["input_ids"].shape == inputs["mm_token_type_ids"].shape == labels.shape
    answers = {look.answer for look in LookTask(num_train=16, num_val=4).pictures(0)[0]}
    for row in labels.tolist():
        written = processor.tokenizer.decode([one for one in row if one != IGNORED])
        assert written.removesuffix("<|im_end|>") in answers


def test_the_vision_tower_learns_too(warmup: LookWarmup) -> None:
    before = {name: tensor.clone() for name, tensor in warmup.model.named_parameters()}
    warmup._train(1e-2, slip_rate=0.0)
    moved = {n for n, tensor in warmup.model.named_parameters() if not tensor.equal(before[n])}
    assert {name for name in moved if ".visual." in name} == {name for name in before if ".visual." in name}
    assert 0.0 <= warmup.accuracy(unseen=True) <= 1.0
