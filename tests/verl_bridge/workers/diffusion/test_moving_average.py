# SPDX-License-Identifier: Apache-2.0
"""A moving average follows the weights slowly, and continues where a checkpoint left it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from recipe.async_pipeline.errors import CheckpointError

pytestmark = pytest.mark.real_engine
DECAY, EVERY = 0.25, 2


class Model(torch.nn.Linear):
    """One weight, which is trained, and one that is not."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.bias.requires_grad_(False)
        self.config = SimpleNamespace(save_pretrained=lambda folder: None)

    def train_to(self, value: float) -> None:
        self.weight.data.fill_(value)


def averages(module: ModuleType, folder: Path, resumed_after: int | None) -> list[float]:
    """Return the average after each step to the weights 1, 2, ..., with a resume in between."""
    model, found = Model(), []
    model.train_to(0.0)
    average = module.MovingAverage(model, DECAY, EVERY)
    for step in range(1, 8):
        model.train_to(step)
        average.step()
        average.save(folder, 0, 1)
        kept = module.load_file(folder / "average" / "diffusion_pytorch_model.safetensors")
        assert kept.keys() == {"weight", "bias"}
        found.append(kept["weight"].item())
        if step == resumed_after:
            average = module.MovingAverage(model, DECAY, EVERY)
            average.load(folder, 0, 1)
    return found


def test_the_average_is_the_formula(module: ModuleType, tmp_path: Path) -> None:
    """Every second step, and with a smaller decay at first: 2 / 11, then 0.25."""
    first = 2 * 9 / 11
    second = first * 0.25 + 4 * 0.75
    third = second * 0.25 + 6 * 0.75
    wanted = [0.0, first, first, second, second, third, third]
    assert averages(module, tmp_path, None) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_resumed_average_is_the_one_that_was_left_alone(
    module: ModuleType, tmp_path: Path, step: int
) -> None:
    for name in ("alone", "resumed"):
        (tmp_path / name).mkdir()
    wanted = averages(module, tmp_path / "alone", None)
    assert averages(module, tmp_path / "resumed", step) == wanted


def test_a_checkpoint_without_it_is_refused(module: ModuleType, tmp_path: Path) -> None:
    model = Model()
    average = module.MovingAverage(model, DECAY, EVERY)
    with pytest.raises(CheckpointError, match="has no moving average; leave diffusion.ema_decay as it was"):
        average.load(tmp_path, 0, 1)
    average.save(tmp_path, 0, 1)
    model.bias.requires_grad_(True)
    with pytest.raises(CheckpointError, match="of another model"):
        module.MovingAverage(model, DECAY, EVERY).load(tmp_path, 0, 1)
