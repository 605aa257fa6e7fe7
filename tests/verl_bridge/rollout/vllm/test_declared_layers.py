# SPDX-License-Identifier: Apache-2.0
"""Models of vLLM whose layers reorder or compute what is published: only right loads pass."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from recipe.async_pipeline.errors import ProofError
from recipe.async_pipeline.installed.engines import installed
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest
from recipe.async_pipeline.weight_sync.proof.map_check import check_map
from tests.conftest import Load
from tests.fakes.adapter_contract import check_loads, prove_first
from tests.fakes.published_models import PublishedModels

pytestmark = [pytest.mark.real_engine, pytest.mark.filterwarnings("default")]

FAMILIES = (
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
    "llama4",
    "gpt-neox",
    "falcon-h1",
    "granite-hybrid",
    "nemotron-h",
    "nemotron-h-moe",
    "granite-moe",
)
OTHERWISE = {
    "0.24": ("qwen3.5", "qwen3.5-moe", "falcon-h1", "nemotron-h-moe"),
    "0.32": ("gpt-neox", "granite-hybrid"),
}
"""Families that other releases of vLLM serve by other classes, or of whose names they have no table."""
STAGED = {"qwen3-next", "qwen3.5", "qwen3.5-moe", "granite-moe"}
"""Families whose loaders only copy, so that versions can be staged during generation."""
LAYER = "model.layers.0"
UNGATED = f"{LAYER}.mixer.experts"
GATED = "model.language_model.layers.0.mlp.experts"


class Families(PublishedModels):
    """With the ranks that vLLM builds of them."""

    def version(self, name: str) -> Manifest:
        """Train a model and publish it; skip the test if it is for other releases."""
        release = ".".join(next(one.version for one in installed() if one.name == "vllm").split(".")[:2])
        if name in OTHERWISE.get(release, ()):
            pytest.skip(f"vLLM {release} serves {name} in another way")
        return self.publish(self.published(name))

    def replica(self, name: str, size: int) -> list[Any]:
        ranks: list[Any] = self._ranks.ranks_of(self._folder / name, size)
        return ranks


@pytest.fixture(scope="module")
def families(load: Load, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Families]:
    made = Families(load, tmp_path_factory.mktemp("families"))
    yield made
    made.close()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_element_is_where_the_layers_say(families: Families, name: str, size: int) -> None:
    first = families.version(name)
    ranks = families.replica(name, size)
    check_loads(ranks, (first, families.version(name)))
    last = families.version(name)
    for rank in ranks:
        assert rank.prepare(last) == (name in STAGED)
        coverage = check_map(last, rank.commit(last, 1 << 20)).coverage
        assert (coverage.explained, coverage.unexplained) == (coverage.served, ())


def changed(rank: Any, names: Iterable[str], orders: dict[str, tuple[int, torch.Tensor]]) -> None:
    """Give the loader two tensors under each other's name, or a tensor with its rows in another order."""
    load, pair = rank.load, tuple(names)
    swaps = dict(zip(pair, pair[::-1], strict=True))

    def wrong(pieces: Iterable[Sequence[tuple[str, torch.Tensor]]]) -> None:
        load(
            [
                (
                    swaps.get(name, name),
                    tensor.index_select(*orders[name]) if name in orders else tensor,
                )
                for name, tensor in piece
            ]
            for piece in pieces
        )

    rank.load = wrong


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("qwen3-next", f"{LAYER}.linear_attn.A_log", f"{LAYER}.linear_attn.dt_bias"),
        ("falcon-h1", f"{LAYER}.mamba.A_log", "model.layers.1.mamba.A_log"),
        ("falcon-h1", f"{LAYER}.mamba.D", f"{LAYER}.mamba.dt_bias"),
        ("granite-hybrid", f"{LAYER}.mamba.A_log", f"{LAYER}.mamba.D"),
        ("nemotron-h", f"{LAYER}.mixer.A_log", f"{LAYER}.mixer.dt_bias"),
        ("nemotron-h-moe", f"{UNGATED}.0.up_proj.weight", f"{UNGATED}.1.up_proj.weight"),
        ("nemotron-h-moe", f"{UNGATED}.2.down_proj.weight", f"{UNGATED}.3.down_proj.weight"),
        ("qwen3.5", f"{LAYER}.linear_attn.A_log", f"{LAYER}.linear_attn.dt_bias"),
        ("qwen3.5", f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight"),
        ("qwen3.5-moe", f"{GATED}.0.gate_proj.weight", f"{GATED}.0.up_proj.weight"),
        ("qwen3.5-moe", f"{GATED}.2.down_proj.weight", f"{GATED}.3.down_proj.weight"),
        ("qwen3.5-moe", "model.visual.blocks.0.attn.qkv.weight", "model.visual.blocks.1.attn.qkv.weight"),
    ],
)
def test_swapped_tensors_are_named_though_no_sample_has_them(
    families: Families, name: str, one: str, other: str
) -> None:
    manifest, ranks = families.version(name), families.replica(name, 2)
    samples = tuple(sample for sample in manifest.samples if sample.name not in (one, other))
    for rank in ranks:
        changed(rank, (one, other), {})
    with pytest.raises(ProofError, match=rf"({one}|{other}) is in the wrong place"):
        prove_first(ranks, replace(manifest, samples=samples))


def exchanged(*blocks: int) -> torch.Tensor:
    """Return the order of rows in blocks of these sizes whose first two blocks are exchanged."""
    first, second, *rest = torch.arange(sum(blocks)).split(blocks)
    return torch.cat([second, first, *rest])


GRANITE_FIRST = "block_sparse_moe.(input_linear.weight|experts.gate_up_proj)"
GRANITE_SECOND = "block_sparse_moe.(output_linear.weight|experts.down_proj)"
"""With transformers 5.10, and with 5.19."""
CONV = exchanged(256, 256, 512)
"""Queries and keys of a convolution, then values."""


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("name", "tensor", "axis", "order"),
    [
        ("qwen3-next", "linear_attn.conv1d.weight", 0, CONV),
        ("qwen3.5", "linear_attn.conv1d.weight", 0, CONV),
        ("qwen3.5-moe", "linear_attn.conv1d.weight", 0, CONV),
        ("falcon-h1", "mamba.conv1d.weight", 0, exchanged(256, 16, 16)),
        ("falcon-h1", "mamba.in_proj.weight", 0, exchanged(256, 256, 16, 16, 8)),
        ("nemotron-h", "mixer.in_proj.weight", 0, exchanged(256, 256, 32, 32, 8)),
        ("nemotron-h-moe", "mixer.experts.0.up_proj.weight", 0, exchanged(32, 32)),
        ("llama4", "self_attn.q_proj.weight", 0, torch.arange(128).view(-1, 2).flip(1).flatten()),
        ("llama4", "self_attn.k_proj.weight", 0, torch.arange(64).view(2, 16, 2).transpose(1, 2).flatten()),
        ("llama4", "feed_forward.experts.gate_up_proj", 2, exchanged(96, 96)),
        ("llama4", "feed_forward.experts.down_proj", 0, exchanged(1, 1, 2)),
        ("gpt-neox", "attention.query_key_value.weight", 0, exchanged(32, 32, 320)),
        ("gpt-neox", "attention.query_key_value.bias", 0, exchanged(96, 96, 192)),
        ("granite-moe", GRANITE_FIRST, 1, exchanged(128, 128)),
        ("granite-moe", GRANITE_FIRST, 0, exchanged(1, 1, 2)),
        ("granite-moe", GRANITE_SECOND, 0, exchanged(1, 1, 2)),
        ("granite-hybrid", "block_sparse_moe.input_linear.weight", 1, exchanged(96, 96)),
    ],
)
def test_rows_in_another_order_are_named(
    families: Families, name: str, tensor: str, axis: int, order: torch.Tensor, size: int
) -> None:
    manifest, ranks = families.version(name), families.replica(name, size)
    (published,) = (
        entry.name for entry in manifest.tensors if re.search(rf"layers\.0\.({tensor})$", entry.name)
    )
    for rank in ranks:
        changed(rank, (), {published: (axis, order)})
    with pytest.raises(ProofError, match=f"{published} is in the wrong place"):
        prove_first(ranks, manifest)


@pytest.mark.parametrize("name", ["falcon-h1", "granite-hybrid", "nemotron-h"])
def test_a_logarithm_that_is_served_as_it_was_published_is_named(families: Families, name: str) -> None:
    manifest, (rank,) = families.version(name), families.replica(name, 1)
    served = next(one for path, one in rank.model.named_parameters() if path.endswith(".A"))
    served.weight_loader = lambda parameter, published: parameter.data.copy_(published)
    with pytest.raises(ProofError, match=r"\.A_log is served with values other than the published ones"):
        prove_first([rank], manifest)
