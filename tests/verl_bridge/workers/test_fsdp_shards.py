# SPDX-License-Identifier: Apache-2.0
"""The parts of all ranks form the whole tensors: of FSDP2 on real ranks, and of fused experts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipe.async_pipeline.weight_sync.arena import Part
from tests import REPOSITORY
from tests.conftest import Load

pytestmark = pytest.mark.real_engine
PARTS = "recipe.async_pipeline.verl_bridge.workers.fsdp_shards"


@pytest.mark.parametrize("count", [1, 2, 4])
def test_fsdp2_ranks_gather_without_assembling(tmp_path: Path, count: int) -> None:
    """Two ranks form one mesh of shards; four ranks form two replicas of two shards."""
    script = str(REPOSITORY / "tests" / "verl_bridge" / "sharded_gather.py")
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}

    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(count), str(tmp_path / "meet")],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]

    for process in ranks:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]
        assert out == ""


def assembled(parts: list[list[Part]]) -> dict[str, torch.Tensor]:
    """Return the whole tensors. Fails unless the parts of all ranks write each element exactly once."""
    found: dict[str, torch.Tensor] = {}
    for part in parts[0]:
        found[part.name] = torch.full(part.shape, float("nan"))
    for rank in parts:
        assert [(p.name, p.shape) for p in rank] == [(p.name, p.shape) for p in parts[0]]
        for part in rank:
            if part.values is not None:
                block = tuple(slice(o, o + n) for o, n in zip(part.offset, part.values.shape, strict=True))
                assert found[part.name][block].isnan().all(), part.name
                found[part.name][block] = part.values
    return found


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_fused_experts_are_split_as_in_verl(load: Load, name: str, dim: int, count: int) -> None:
    whole = torch.randn(4, 6, 8)
    full_name = f"model.layers.0.mlp.experts.{name}"
    verl = load("verl.workers.engine.fsdp.utils").unfuse_moe_params([(full_name, whole)], "qwen3_moe")

    offset, parts = 0, []
    for block in whole.chunk(count, dim):
        at = tuple(offset if d == dim else 0 for d in range(3))
        offset += block.shape[dim]
        part = Part(full_name, tuple(whole.shape), whole.dtype, at, block)
        parts.append(list(load(PARTS).unfused(part, "qwen3_moe")))
    parts.append(
        list(
            load(PARTS).unfused(
                parts[0][0]._replace(name=full_name, shape=(4, 6, 8), values=None), "qwen3_moe"
            )
        )
    )

    found = assembled(parts)
    for expected_name, expected in verl:
        assert torch.equal(found.pop(expected_name), expected)
    assert found == {}


@pytest.mark.parametrize(
    ("name", "shape", "model_type"),
    [
        ("model.layers.0.mlp.experts.down_proj", (4, 6, 8), "gpt_oss"),
        ("model.layers.0.mlp.experts.down_proj", (6, 8), "qwen3_moe"),
        ("model.layers.0.mlp.down_proj.weight", (4, 6, 8), "qwen3_moe"),
    ],
)
def test_other_tensors_stay_as_they_are(
    load: Load, name: str, shape: tuple[int, ...], model_type: str
) -> None:
    part = Part(name, shape, torch.float32, (0,) * len(shape), torch.zeros(shape))
    assert list(load(PARTS).unfused(part, model_type)) == [part]


def test_other_engines_assemble_their_tensors(load: Load) -> None:
    assert load(PARTS).held_by(SimpleNamespace(module=torch.nn.Linear(2, 2))) is None
    fsdp = load("verl.workers.engine.fsdp.transformer_impl").FSDPEngine
    engine = object.__new__(fsdp)
    engine.module = torch.nn.Linear(2, 2)
    assert load(PARTS).held_by(engine) is None, "not sharded by FSDP2"


def test_a_tensor_that_all_ranks_hold_is_written_by_the_first(load: Load) -> None:
    part = load(PARTS).part_of("steps", torch.tensor([3]))
    assert part.shape == (1,)
    assert part.values.tolist() == [3]
