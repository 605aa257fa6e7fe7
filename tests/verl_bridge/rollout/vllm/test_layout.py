# SPDX-License-Identifier: Apache-2.0
"""vLLM's own models and loaders, rank by rank: the tables explain each load, and faults are named."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.async_pipeline.errors import ProofError, WeightSyncError
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest
from recipe.async_pipeline.weight_sync.proof.map_check import check_map
from tests import HANG_S
from tests.conftest import Load
from tests.fakes.adapter_contract import check_loads, check_stages, prove_first
from tests.fakes.published_models import PublishedModels, Weights

pytestmark = [pytest.mark.real_engine, pytest.mark.filterwarnings("default")]

NAMES = ("qwen2-tied", "qwen3-untied", "llama", "qwen3-moe", "phi3-fused", "glm4-fused")
Q, K, V = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")
EXPERT = "model.layers.0.mlp.experts"


class Models(PublishedModels):
    """With the ranks that vLLM builds of them."""

    def replica(self, name: str, size: int, *, experts_apart: bool = False) -> list[Any]:
        make = self._ranks.ModelRank
        return [make(self._folder / name, rank, size, experts_apart=experts_apart) for rank in range(size)]

    def drafters(self, name: str, size: int) -> list[Any]:
        ranks = [self._ranks.DrafterRank(self._folder / name, rank, size) for rank in range(size)]
        if not hasattr(ranks[0].model, "hf_to_vllm_mapper"):
            pytest.skip("this vLLM has no table of a drafter's names, only code")
        return ranks

    def as_rank(self, rank: int, size: int) -> Any:
        return self._ranks.as_rank(rank, size)

    def adapter_ranks(self, name: str, size: int, confused: bool) -> list[Any]:
        workers = [self._ranks.AdapterRank(self._folder / name, rank, size, 8) for rank in range(size)]
        for worker in workers if confused else ():
            add = worker.add_lora

            def add_wrongly(request: Any, add: Any = add) -> None:
                swapped = {
                    key.replace("k_proj", "?").replace("v_proj", "k_proj").replace("?", "v_proj"): tensor
                    for key, tensor in request.lora_tensors.items()
                }
                request.lora_tensors = swapped
                add(request)

            worker.add_lora = add_wrongly
        return workers

    def publish_adapter(self, name: str) -> Manifest:
        from peft import LoraConfig, get_peft_model

        shards = importlib.import_module("recipe.async_pipeline.verl_bridge.workers.fsdp_shards")
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        model = get_peft_model(
            self._checkpoints.make(name, self._folder / name),
            LoraConfig(r=4, lora_alpha=12, target_modules=targets),
        )
        torch.manual_seed(1)
        tensors = {key: torch.randn_like(tensor) for key, tensor in shards.adapter_of(model).items()}
        parts = [shards.part_of(key, tensor) for key, tensor in tensors.items()]
        self._version += 1
        ticket = self._writer.gather_parts(
            self._version, parts, shards.described(model.peft_config["default"])
        )
        assert ticket is not None
        return await_manifest(ticket, HANG_S)

    def of_drafter(self, name: str) -> Weights:
        weights: Weights = self._ranks.drafter_weights(*self.drafters(name, 1))
        return weights


@pytest.fixture(scope="module")
def models(load: Load, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    made = Models(load, tmp_path_factory.mktemp("models"))
    yield made
    made.close()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_where_the_tables_say(models: Models, name: str, size: int) -> None:
    """Four ranks are more than the two heads of keys and values."""
    models.published(name)
    ranks = models.replica(name, size)
    for _ in range(2):
        weights = models.published(name)
        manifest = models.publish(weights)
        assert prove_first(ranks, manifest) == [len(weights)] * size
    for rank in ranks:
        assert rank.prepare(manifest), "its load was recorded"
        assert check_map(manifest, rank.commit(manifest, 1 << 20)).coverage.tensors == len(weights)


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3-moe", "phi3-fused"])
def test_the_contract_of_adapters_holds(models: Models, name: str) -> None:
    models.published(name)
    ranks = models.replica(name, 2)
    check_loads(ranks, (models.publish(models.published(name)) for _ in range(3)))
    first, second = (models.publish(models.published(name)) for _ in range(2))
    check_stages(ranks, first, second)


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_has_its_experts(models: Models, size: int) -> None:
    experts = sum(".mlp.experts." in name for name in models.published("qwen3-moe"))
    ranks = models.replica("qwen3-moe", size, experts_apart=True)
    for _ in range(2):
        weights = models.published("qwen3-moe")
        manifest = models.publish(weights)
        assert prove_first(ranks, manifest) == [len(weights) - experts + experts // size] * size
    assert all(rank.prepare(manifest) for rank in ranks), "their loads were recorded"


def test_experts_that_a_cpu_kernel_pads_are_refused(models: Models, load: Load) -> None:
    """Each of two ranks has a width of 48, which vLLM pads when it starts."""
    kernels = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe")
    if not hasattr(kernels, "CPUUnquantizedExperts"):
        pytest.skip("on a CPU, this vLLM packs experts at its first load only")
    manifest = models.publish(models.published("mixtral"))
    for rank in models.replica("mixtral", 2):
        rank.start()
        runner = SimpleNamespace(model=rank.model, vllm_config=rank.config)
        adapters = load("recipe.async_pipeline.verl_bridge.rollout.vllm.adapter")
        adapter = adapters.VllmAdapter(SimpleNamespace(device=rank.device, model_runner=runner))
        with pytest.raises(WeightSyncError, match="experts of width 48 cannot be updated on a CPU; it must"):
            adapter.commit(manifest, 1 << 20)


SEEING = "qwen2.5-vl"
OF_PICTURES = {
    "the vision tower": "visual.blocks.1.attn.qkv.weight",
    "the projector": "visual.merger.mlp.0.weight",
    "the language model": "model.layers.1.mlp.down_proj.weight",
}


@pytest.mark.parametrize("size", [1, 2])
def test_each_part_of_a_model_of_pictures_is_proved(models: Models, size: int) -> None:
    weights = models.published(SEEING)
    ranks = models.replica(SEEING, size)
    manifest = models.publish(weights)
    assert prove_first(ranks, manifest) == [len(weights)] * size
    assert check_map(manifest, ranks[0].commit(manifest, 1 << 20)).coverage.tensors == len(weights)
    assert weights.keys() >= set(OF_PICTURES.values())


@pytest.mark.parametrize("name", OF_PICTURES.values(), ids=OF_PICTURES)
def test_a_part_of_a_model_of_pictures_that_is_missing_is_an_error(models: Models, name: str) -> None:
    weights = models.published(SEEING)
    del weights[name]
    with pytest.raises(ProofError, match=rf"{re.escape(name.removeprefix('model.'))} is served, but"):
        prove_first(models.replica(SEEING, 1), models.publish(weights))


DRAFTER = "model.mtp_layers.0"


@pytest.mark.parametrize("size", [1, 2])
def test_the_names_of_a_drafter_are_mapped(models: Models, size: int) -> None:
    """A run with a drafter is refused, since no trainer publishes one; the tables would explain it."""
    models.published("qwen2-tied")
    weights, ranks = models.of_drafter("qwen2-tied"), models.drafters("qwen2-tied", size)
    assert f"{DRAFTER}.self_attn.q_proj.weight" in weights
    manifest = models.publish(weights)
    assert prove_first(ranks, manifest) == [len(weights)] * size
    assert check_map(manifest, ranks[0].commit(manifest, 1 << 20)).coverage.tensors == len(weights)


def test_a_drafter_of_swapped_or_missing_tensors_is_an_error(models: Models) -> None:
    """Its weights of the start would otherwise be served with every version."""
    models.published("qwen2-tied")
    weights, swapped = models.of_drafter("qwen2-tied"), ("gate_proj", "up_proj")
    names = [f"{DRAFTER}.mlp.{part}.weight" for part in swapped]
    ranks = models.drafters("qwen2-tied", 2)
    for rank in ranks:
        renamed(rank, dict(zip(names, names[::-1], strict=True)))
    with pytest.raises(ProofError, match="|".join(names)):
        prove_first(ranks, models.publish(weights))
    del weights[f"{DRAFTER}.input_proj.weight"]
    with pytest.raises(ProofError, match=r"mtp_layers\.\d+\.input_proj\.weight is served, but"):
        prove_first(models.drafters("qwen2-tied", 2), models.publish(weights))


def renamed(rank: Any, swaps: dict[str, str]) -> None:
    """The loader gets tensors under the names of others."""
    load = rank.load

    def wrong(pieces: Iterable[Sequence[tuple[str, torch.Tensor]]]) -> None:
        load([(swaps.get(name, name), tensor) for name, tensor in piece] for piece in pieces)

    rank.load = wrong


DENSE = [
    (K, V),
    ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
]
PICTURES = [
    ("visual.blocks.0.attn.qkv.weight", "visual.blocks.1.attn.qkv.weight"),
    ("visual.merger.ln_q.weight", "visual.blocks.0.norm1.weight"),
    (K, V),
]
EXPERTS = [
    (f"{EXPERT}.0.gate_proj.weight", f"{EXPERT}.1.gate_proj.weight"),
    (f"{EXPERT}.2.down_proj.weight", f"{EXPERT}.3.down_proj.weight"),
    (f"{EXPERT}.2.gate_proj.weight", f"{EXPERT}.2.up_proj.weight"),
]


@pytest.mark.parametrize(
    ("name", "swapped", "apart"),
    [("llama", pair, False) for pair in DENSE]
    + [("qwen3-moe", pair, apart) for pair in EXPERTS for apart in (False, True)]
    + [(SEEING, pair, False) for pair in PICTURES],
)
def test_swapped_tensors_are_named(models: Models, name: str, swapped: tuple[str, str], apart: bool) -> None:
    weights = models.published(name)
    ranks = models.replica(name, 2, experts_apart=apart)
    for rank in ranks:
        renamed(rank, dict(zip(swapped, swapped[::-1], strict=True)))
    with pytest.raises(ProofError, match="|".join(swapped)):
        prove_first(ranks, models.publish(weights))


@pytest.mark.parametrize("name", ["llama", "phi3-fused", "qwen3-moe"])
def test_the_shard_of_another_rank(models: Models, name: str) -> None:
    weights = models.published(name)
    ranks = models.replica(name, 2)
    ranks[1].model = models.replica(name, 2)[0].model  # loads what the first rank loads
    with pytest.raises(ProofError, match="is in the wrong place|not in the order|no rank of the replica"):
        prove_first(ranks, models.publish(weights))


def left_out(models: Models, name: str, tensor: str) -> None:
    weights = models.published(name)
    ranks = models.replica(name, 1)
    load = ranks[0].load
    ranks[0].load = lambda pieces: load([named for named in piece if named[0] != tensor] for piece in pieces)
    prove_first(ranks, models.publish(weights))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama", "lm_head.weight"),
        ("llama", Q),
        ("qwen3-moe", f"{EXPERT}.3.up_proj.weight"),
        ("phi3-fused", "model.layers.0.self_attn.qkv_proj.weight"),
        ("qwen2-tied", "model.embed_tokens.weight"),
        ("qwen2-tied", K.replace("weight", "bias")),
    ],
)
def test_a_tensor_that_was_left_out_is_named(models: Models, name: str, tensor: str) -> None:
    with pytest.raises(ProofError, match=f"{tensor} was published, but the engine did not load it"):
        left_out(models, name, tensor)


def test_a_persistent_buffer_must_be_published(models: Models) -> None:
    weights = models.published("llama")
    ranks = models.replica("llama", 1)
    ranks[0].model.model.layers[0].mlp.register_buffer("bias", torch.zeros(4))
    with pytest.raises(ProofError, match=r"model\.layers\.0\.mlp\.bias is served, but its element 0"):
        prove_first(ranks, models.publish(weights))
    ranks = models.replica("llama", 1)
    ranks[0].model.model.layers[0].mlp.register_buffer("table", torch.zeros(4), persistent=False)
    assert prove_first(ranks, models.publish(weights)) == [len(weights)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("confused", [False, True])
def test_an_adapter_is_proved_where_ranks_share_heads(
    models: Models, load: Load, monkeypatch: pytest.MonkeyPatch, size: int, confused: bool
) -> None:
    """Four ranks have two heads of keys and values: two ranks have the same rows."""
    models.published("llama")
    adapters = load("recipe.async_pipeline.verl_bridge.rollout.vllm.adapter")
    ranks = []
    for rank, worker in enumerate(models.adapter_ranks("llama", size, confused)):
        made = adapters.VllmAdapter(worker)
        commit = made.commit

        def committed(manifest: Manifest, piece_bytes: int, rank: int = rank, commit: Any = commit) -> Any:
            with models.as_rank(rank, size):
                return commit(manifest, piece_bytes)

        made.commit = committed
        ranks.append(made)
    manifest = models.publish_adapter("llama")
    if confused:
        with pytest.raises(ProofError, match=r"[kv]_proj\.lora_[AB].* values other than the published ones"):
            prove_first(ranks, manifest)
        return
    assert prove_first(ranks, manifest) == [len(manifest.tensors)] * size


def test_a_published_head_of_a_tied_model_must_equal_the_embedding(models: Models) -> None:
    weights = models.published("qwen2-tied")
    embedding = weights["model.embed_tokens.weight"]
    both = {**weights, "lm_head.weight": embedding}
    assert prove_first(models.replica("qwen2-tied", 2), models.publish(both)) == [len(both)] * 2
    other = {**weights, "lm_head.weight": embedding + 1}
    with pytest.raises(ProofError, match=r"lm_head.weight is served with values other|is in the wrong place"):
        prove_first(models.replica("qwen2-tied", 2), models.publish(other))
