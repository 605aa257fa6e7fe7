# SPDX-License-Identifier: Apache-2.0
"""The parts of all ranks form the whole tensors: of FSDP2 on real ranks, and of fused experts."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.async_pipeline.weight_sync.memory.arena import HeldBlock
from tests import HANG_S, REPOSITORY
from tests.conftest import Load
from tests.fakes.private_mounts import may_unshare
from tests.fakes.sharded_model import VERSIONS, make_model, train
from tests.fakes.training_hosts import TrainingHost, training_hosts, versions_of

pytestmark = pytest.mark.real_engine
PARTS = "recipe.async_pipeline.verl_bridge.workers.fsdp_shards"
ENVIRONMENT = {**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
"""Of a rank: its script imports the fakes, which no installed package has."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the ranks of each cell of `sharded_ranks.py` printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.verl_bridge.sharded_ranks", str(tmp_path_factory.mktemp("meet"))],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: list(ranks.values()) for name, ranks in json.loads(done.stdout).items()}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_fsdp2_ranks_gather_without_assembling(printed: dict[str, list[str]], count: int) -> None:
    """Two ranks form one mesh of shards; four ranks form two replicas of two shards."""
    assert printed[f"gather@{count}"] == [""] * count


@pytest.mark.parametrize("count", [1, 2])
def test_adapters_are_published_without_their_base(printed: dict[str, list[str]], count: int) -> None:
    assert printed[f"adapters@{count}"] == [""] * count


# Several hosts.


def expected_version(model: torch.nn.Module, version: int) -> dict[str, torch.Tensor]:
    """Return the weights of a version, as the ranks of `gather_on_hosts.py` train them."""
    train(model, version)
    return {
        name: weight.detach().bfloat16() if weight.is_floating_point() else weight
        for name, weight in model.state_dict().items()
    }


@pytest.mark.skipif(not may_unshare(), reason="private mounts require root")
@pytest.mark.parametrize(("hosts", "count"), [(2, 2), (2, 4)])
def test_ranks_on_several_hosts_write_into_separate_memory(tmp_path: Path, hosts: int, count: int) -> None:
    script = REPOSITORY / "tests" / "verl_bridge" / "gather_on_hosts.py"
    commands = [
        [sys.executable, str(script), str(host), str(hosts), str(count), str(tmp_path)]
        for host in range(hosts)
    ]

    async def main(asked: list[TrainingHost]) -> None:
        model, version = make_model(), 0
        async for found in versions_of(asked, VERSIONS):
            expected = expected_version(model, version)
            assert list(found) == list(expected)
            assert all(torch.equal(found[name], value) for name, value in expected.items())
            version += 1
        assert version == VERSIONS

    with training_hosts(commands, tmp_path, ENVIRONMENT) as asked:
        asyncio.run(main(asked))


def assembled(parts: list[list[HeldBlock]]) -> dict[str, torch.Tensor]:
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
        part = HeldBlock(full_name, tuple(whole.shape), whole.dtype, at, block)
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


@pytest.mark.parametrize("name", ["up_proj", "down_proj"])
def test_experts_without_a_gate_are_split(load: Load, name: str) -> None:
    whole, experts = torch.randn(4, 6, 8), "model.layers.0.mixer.experts"
    part = HeldBlock(f"{experts}.{name}", (4, 6, 8), whole.dtype, (0, 0, 0), whole)
    found = assembled([list(load(PARTS).unfused(part, "nemotron_h"))])
    assert list(found) == [f"{experts}.{expert}.{name}.weight" for expert in range(4)]
    assert torch.equal(torch.stack([*found.values()]), whole)


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
    part = HeldBlock(name, shape, torch.float32, (0,) * len(shape), torch.zeros(shape))
    assert list(load(PARTS).unfused(part, model_type)) == [part]


SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
}
"""Of small models; transformers ignores the ones that a model does not have."""


@pytest.mark.parametrize(
    "model_type", ["qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "minimax", "minimax_m2", "phimoe", "qwen3"]
)
def test_tensors_are_published_as_checkpoints_have_them(load: Load, model_type: str, tmp_path: Path) -> None:
    transformers = load("transformers")
    config = transformers.AutoConfig.for_model(model_type, **SIZES)
    check_names(load, transformers.AutoModelForCausalLM.from_config(config), tmp_path)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_parts_of_models_of_pictures_have_their_names_in_checkpoints(
    load: Load, model_type: str, tmp_path: Path
) -> None:
    transformers = load("transformers")
    vision = {"depth": 1, "hidden_size": 16, "embed_dim": 16, "num_heads": 2, "intermediate_size": 16}
    config = transformers.AutoConfig.for_model(model_type, text_config=SIZES, vision_config=vision)
    check_names(load, transformers.AutoModelForImageTextToText.from_config(config), tmp_path)


def check_names(load: Load, model: Any, folder: Path) -> None:
    """Compare with the names that a checkpoint has, as engines load no others."""
    model.save_pretrained(folder)
    saved = load("safetensors.torch").load_file(folder / "model.safetensors")
    parts = [
        part
        for name, tensor in model.state_dict().items()
        for part in load(PARTS).published(load(PARTS).part_of(name, tensor), model.config.model_type)
    ]
    assert {part.name for part in parts} == saved.keys()
    assert all(torch.equal(part.values, saved[part.name]) for part in parts)


def test_other_engines_assemble_their_tensors(load: Load) -> None:
    assert load(PARTS).held_by(SimpleNamespace(module=torch.nn.Linear(2, 2))) is None


def test_a_tensor_that_all_ranks_hold_is_written_by_the_first(load: Load) -> None:
    part = load(PARTS).part_of("steps", torch.tensor([3]))
    assert part.shape == (1,)
    assert part.values.tolist() == [3]
