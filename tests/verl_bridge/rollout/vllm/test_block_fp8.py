# SPDX-License-Identifier: Apache-2.0
"""vLLM's own fp8 models, loaded by verl's conversion, rank by rank: every weight and scale is proved.

vLLM builds and loads these models on any CPU with AVX-512, and builds them on the others. Only its matrix
products need one with AMX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.async_pipeline.errors import ProofError
from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest
from recipe.async_pipeline.weight_sync.proof.element_map import View
from tests import HANG_S
from tests.conftest import Load
from tests.fakes.adapter_contract import check_loads, check_stages, prove_first

pytestmark = [pytest.mark.real_engine, pytest.mark.filterwarnings("default")]

SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "decoder_sparse_step": 1}
QKV, DOWN = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def without_triton(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's kernel of Triton needs an accelerator; its other implementation is used on CPU tensors."""
    monkeypatch.setattr(load("verl.utils.kernel.fp8_kernel"), "_DISABLE_TRITON_FP8", True)


class Setup:
    """A checkpoint, its published versions, and the ranks of vLLM that serve it in fp8."""

    def __init__(self, load: Load, folder: Path, *, experts: bool = False) -> None:
        self._fake, self._checkpoints = load("tests.fakes.fp8_models"), load("tests.fakes.checkpoints")
        transformers = load("transformers")
        torch.manual_seed(0)
        dense = transformers.Qwen3Config(**SIZES)
        config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS) if experts else dense
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.model.save_pretrained(folder)
        self._folder, self._version = folder, 0
        self._packs: bool = load("vllm._custom_ops")._supports_cpu_fp8_w8a16
        self._writer = ArenaWriter(1 << 20, 1000, None)

    def publish(self) -> tuple[dict[str, torch.Tensor], Manifest]:
        self._version += 1
        weights: dict[str, torch.Tensor] = self._checkpoints.train(self.model, self._version)
        return weights, await_manifest(self._writer.gather(self._version, weights.items()), HANG_S)

    def ranks(self, size: int, *, packed: bool = True) -> list[Any]:
        if packed and not self._packs:
            pytest.skip("vLLM packs fp8 weights on CPUs with AVX-512 only")
        return [self._fake.Fp8Rank(self._folder, rank, size, packed=packed) for rank in range(size)]

    def close(self) -> None:
        self._writer.close()


@pytest.fixture(scope="module")
def made(load: Load, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = Setup(load, tmp_path_factory.mktemp("fp8"))
    yield setup
    setup.close()


@pytest.fixture(scope="module")
def with_experts(load: Load, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = Setup(load, tmp_path_factory.mktemp("experts"), experts=True)
    yield setup
    setup.close()


@pytest.mark.parametrize("size", [1, 2])
def test_every_weight_and_scale_is_proved(made: Setup, size: int) -> None:
    ranks = made.ranks(size)
    for _ in range(2):
        weights, manifest = made.publish()
        assert prove_first(ranks, manifest) == [len(weights)] * size
    quantized = [name for name, tensor in ranks[0].tensors().items() if tensor.dtype is torch.float8_e4m3fn]
    assert len(quantized) == 8, "four linear layers in each of two blocks"


@pytest.mark.parametrize("size", [1, 2])
def test_the_contract_of_adapters_holds(made: Setup, size: int) -> None:
    check_loads(made.ranks(size), (made.publish()[1] for _ in range(3)))
    check_stages(made.ranks(size), made.publish()[1], made.publish()[1])


@pytest.mark.parametrize("size", [1, 2])
def test_the_weights_and_scales_of_experts_are_proved(with_experts: Setup, size: int) -> None:
    ranks = with_experts.ranks(size)
    check_loads(ranks, (with_experts.publish()[1] for _ in range(2)))
    check_stages(ranks, with_experts.publish()[1], with_experts.publish()[1])
    fused = {name for one in ranks[0].computed() for name in one.served if ".experts." in name}
    parts = ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv")
    assert {name.rpartition(".")[2] for name in fused} == set(parts)
    one_wrong(next(name for name in fused if name.endswith("w13_weight_scale_inv")))(ranks[0])
    with pytest.raises(ProofError, match="w13_weight_scale_inv is served with values other"):
        prove_first(ranks, with_experts.publish()[1])


@pytest.fixture
def device(load: Load, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A device whose kernel for fp8 is verl's other implementation."""
    simulation, kernels = load("tests.fakes.simulated_device"), load("verl.utils.kernel.fp8_kernel")

    def kernel(values: torch.Tensor, block: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        if not values.is_cuda:
            raise simulation.WrongMemory("the kernel for fp8 got a tensor in host memory")
        quantized, scales = kernels._scaled_fp8_blockwise_pytorch(values, block)
        return quantized, scales.squeeze(-1)

    load("tests.fakes.fp8_models")  # what it imports asks for the machine's real devices
    monkeypatch.setattr(kernels, "_DISABLE_TRITON_FP8", False)
    monkeypatch.setattr(kernels, "_TRITON_AVAILABLE", True)
    monkeypatch.setattr(kernels, "scaled_fp8_blockwise_triton", kernel)
    with simulation.simulated_device() as simulated:
        yield simulated


@pytest.mark.parametrize("model", ["made", "with_experts"])
def test_weights_on_a_device_are_quantized_there(
    request: pytest.FixtureRequest, device: Any, model: str
) -> None:
    setup: Setup = request.getfixturevalue(model)
    ranks = setup.ranks(2)
    for index, rank in enumerate(ranks):
        rank.move(torch.device("cuda", index), device.adopt)
    check_loads(ranks, (setup.publish()[1] for _ in range(3)))
    check_stages(ranks, setup.publish()[1], setup.publish()[1])
    manifest = setup.publish()[1]
    for rank in ranks:
        assert {tensor.device for tensor in rank.tensors().values()} == {rank.device}
        staged = rank.conversion()(rank.published(manifest)).values()
        assert {tensor.device for of_name in staged for _, tensor in of_name} == {rank.device}


def test_weights_in_host_memory_are_quantized_on_the_device_of_the_rank(made: Setup, device: Any) -> None:
    ranks = made.ranks(2, packed=False)
    manifest = made.publish()[1]
    for index, rank in enumerate(ranks):
        rank.move(torch.device("cuda", index), device.adopt)
        converted = dict(rank.convert_piece([*rank.published(manifest).items()]))
        quantized = [tensor for tensor in converted.values() if tensor.dtype is torch.float8_e4m3fn]
        assert len(quantized) == 14, "seven linear layers in each of two blocks"
        assert {tensor.device for tensor in quantized} == {rank.device}


@pytest.mark.parametrize("size", [1, 2])
def test_weights_are_quantized_before_the_commit(
    made: Setup, load: Load, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A version that was prepared is served as one that was not, and its load quantizes nothing."""
    ranks, others = made.ranks(size), made.ranks(size)
    first, second = made.publish()[1], made.publish()[1]
    assert not any(rank.prepare(first) for rank in ranks), "the layout is not known yet"
    prove_first(ranks, first)
    prove_first(others, second)
    ended: Queue[BaseException | None] = Queue()
    for rank in ranks:
        assert rank.prepare(second, ended.put) and ended.get(timeout=HANG_S) is None

    def quantize(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the load has quantized a weight")

    with monkeypatch.context() as during:
        during.setattr(load("verl.utils.vllm.vllm_quant_utils"), "scaled_fp8_blockwise", quantize)
        during.setattr(ranks[0]._fp8, "_quantized", quantize)
        prove_first(ranks, second)
    for rank, other in zip(ranks, others, strict=True):
        served = rank.tensors()
        for name, tensor in other.tensors().items():
            assert torch.equal(served[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert all(rank.staged_version() is None for rank in ranks)


def test_served_weights_are_close_to_the_published_ones(made: Setup) -> None:
    """Independent of verl's conversion: an element is off by half a step of fp8 at most."""
    (rank,) = made.ranks(1)
    weights, manifest = made.publish()
    prove_first([rank], manifest)
    tensors = rank.tensors()
    published = weights[DOWN].float()
    scales = tensors[DOWN + "_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    error = (tensors[DOWN].float() * scales - published).abs()
    assert (error <= 16.01 * scales).all(), "the steps before 448 are 32"
    assert (error <= published.abs() / 15.9 + scales / 500).all()
    largest = published.reshape(2, 128, -1, 128).abs().amax((1, 3))
    assert torch.allclose(tensors[DOWN + "_scale_inv"], largest / 448)


def no_scales(rank: Any) -> None:
    """verl's conversion without its scales, as a bare load would leave them."""
    load = rank.load

    def without(pieces: Iterable[Sequence[tuple[str, torch.Tensor]]]) -> None:
        before = {n: t.clone() for n, t in rank.tensors().items() if n.endswith("_scale_inv")}
        load(pieces)
        for name, values in before.items():
            rank.tensors()[name].copy_(values)

    rank.load = without


def one_wrong(name: str) -> Callable[[Any], None]:
    def change(rank: Any) -> None:
        def after_the_load() -> None:
            rank.tensors()[name].view(torch.uint8).bitwise_xor_(1)

        rank.finish = after_the_load

    return change


@pytest.mark.parametrize(
    ("sabotage", "error"),
    [
        (no_scales, "_scale_inv is served with values other than the published ones"),
        (one_wrong(QKV), f"{QKV} is served with values other"),
        (one_wrong(QKV + "_scale_inv"), f"{QKV}_scale_inv is served with values other"),
        (one_wrong("model.norm.weight"), "model.norm.weight is served with values other"),
    ],
)
def test_a_wrong_load_is_an_error_with_the_tensors_name(
    made: Setup, sabotage: Callable[[Any], None], error: str
) -> None:
    (rank,) = made.ranks(1)
    sabotage(rank)
    with pytest.raises(ProofError, match=error):
        prove_first([rank], made.publish()[1])


def test_ranks_with_each_others_shards_are_an_error(made: Setup) -> None:
    ranks = made.ranks(2)
    first, second = (rank._fp8 for rank in ranks)
    first._table, second._table = second._table, first._table
    with pytest.raises(ProofError, match="is served with values other"):
        prove_first(ranks, made.publish()[1])


def test_an_engine_without_quantization_is_left_alone(module: ModuleType) -> None:
    assert module.BlockFp8.of(SimpleNamespace(vllm_config=SimpleNamespace(quant_config=None)), None) is None


WHOLE = (512, 300)


@pytest.mark.parametrize(
    ("view", "wanted"),
    [
        (View.whole(WHOLE), View(0, (4, 3), (3, 1))),
        (View.whole(WHOLE).narrow(0, 128, 256), View(3, (2, 3), (3, 1))),
        (View.whole(WHOLE).narrow(1, 128, 172), View(1, (4, 2), (3, 1))),
        (View.whole(WHOLE).narrow(0, 384, 128), View(9, (1, 3), (3, 1))),
    ],
)
def test_scales_of_a_shard(module: ModuleType, view: View, wanted: View) -> None:
    assert module.blocks_of("w", view, WHOLE, (128, 128)) == wanted


def test_scales_of_an_expert(module: ModuleType) -> None:
    """The second of three experts, whose matrices of gate and up are on top of each other."""
    up = View.whole((3, 512, 256)).select(0, 1).narrow(0, 256, 256)
    assert module.blocks_of("w13", up, (3, 512, 256), (128, 128)) == View(8 + 4, (2, 2), (2, 1))


@pytest.mark.parametrize(
    "view",
    [View.whole(WHOLE).narrow(0, 64, 128), View.whole(WHOLE).narrow(1, 0, 64), View(0, (300, 512), (1, 300))],
)
def test_a_shard_that_cuts_blocks_is_refused(module: ModuleType, view: View) -> None:
    with pytest.raises(ProofError, match="w is divided at row .* which cuts blocks of 128 x 128"):
        module.blocks_of("w", view, WHOLE, (128, 128))
