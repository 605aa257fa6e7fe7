# SPDX-License-Identifier: Apache-2.0
"""verl's checkpoints load without running code; a file that would run code is refused."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from recipe.async_pipeline.errors import CheckpointError
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.where),))

    def __init__(self, where: Path) -> None:
        self.where = where


def test_a_file_that_would_run_code_is_refused(module: ModuleType, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2), "rng": Evil(tmp_path / "it_ran")}, tmp_path / "evil.pt")
    with pytest.raises(
        CheckpointError, match=r"the_folder holds more than tensors and plain values, and was not loaded"
    ):
        with module.weights_only(Path("the_folder")):
            torch.load(tmp_path / "evil.pt", weights_only=False)
    assert not (tmp_path / "it_ran").exists()
    torch.load(tmp_path / "evil.pt", weights_only=False)
    assert (tmp_path / "it_ran").exists(), "outside of weights_only the code runs"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_everything_that_a_rank_saves_can_be_loaded(
    module: ModuleType, load: Load, one_rank: None, tmp_path: Path
) -> None:
    """Load what verl's FSDP checkpoint manager writes: sharded states, scheduler and random state."""
    manager = load("verl.utils.checkpoint.checkpoint_manager").BaseCheckpointManager
    model = torch.nn.Linear(4, 3)
    torch.distributed.fsdp.fully_shard(
        model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(max, 1))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    saved = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "extra": {"lr_scheduler": scheduler.state_dict(), "rng": manager.get_rng_state()},
    }
    for name, state in saved.items():
        torch.save(state, tmp_path / f"{name}.pt")
    following = random.random(), float(np.random.random()), torch.rand(1).item()
    with module.weights_only(tmp_path):
        found = {name: torch.load(tmp_path / f"{name}.pt", weights_only=False) for name in saved}
    assert torch.equal(found["model"]["weight"].to_local(), saved["model"]["weight"].to_local())
    assert found["optim"].keys() == saved["optim"].keys()
    manager.load_rng_state(found["extra"]["rng"])
    assert (random.random(), float(np.random.random()), torch.rand(1).item()) == following
    scheduler.load_state_dict(found["extra"]["lr_scheduler"])
