# SPDX-License-Identifier: Apache-2.0
"""The contract of engine adapters over a transformer, and what is left out of a load is a ProofError."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from recipe.async_pipeline.diffusion.families import StableDiffusion3
from recipe.async_pipeline.diffusion.transformer_adapter import TransformerAdapter
from recipe.async_pipeline.errors import ProofError, WeightSyncError
from recipe.async_pipeline.weight_sync.engine.serving_rank import ServingRank
from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter, HeldBlock
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest, encode
from tests import HANG_S
from tests.fakes.adapter_contract import PIECE_BYTES, check_loads, check_stages, order_of_loads, prove_first
from tests.fakes.tiny_flow import tiny_conditions, tiny_sd3

pytestmark = pytest.mark.real_engine
pytest.importorskip("diffusers")
pytest.importorskip("peft")

CPU = torch.device("cpu")
BUFFER, WEIGHT = "pos_embed.pos_embed", "transformer_blocks.0.attn.to_q.weight"
ADAPTER = "base_model.model.transformer_blocks.0.attn.to_q.lora_B.weight"
Publish = Callable[..., Manifest]


@pytest.fixture
def publish() -> Iterator[Publish]:
    writer, version = ArenaWriter(1 << 16, 1000, None), iter(range(1, 100))

    def gather(tensors: dict[str, torch.Tensor], adapter: str | None = None) -> Manifest:
        parts = [HeldBlock(n, tuple(t.shape), t.dtype, (0,) * t.dim(), t) for n, t in tensors.items()]
        ticket = writer.gather_parts(next(version), parts, adapter)
        assert ticket is not None
        return await_manifest(ticket, HANG_S)

    yield gather
    writer.close()


def weights(seed: int) -> dict[str, torch.Tensor]:
    """All tensors of a trained model; a training changes its buffers too, to see whether they travel."""
    tensors = {name: value.clone() for name, value in tiny_sd3(seed, layers=1).state_dict().items()}
    tensors[BUFFER] += seed
    return tensors


def trained_adapter(seed: int, **settings: Any) -> tuple[Any, dict[str, torch.Tensor], str]:
    """A trainer's model with an adapter, the tensors and the description that are published."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    targets = list(StableDiffusion3.lora_targets)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": targets, "bias": "none", **settings})
    model = get_peft_model(tiny_sd3(0, layers=1), config).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    described = json.dumps(
        config.to_dict(), default=lambda value: sorted(value) if isinstance(value, set) else str(value)
    )
    return model, dict(get_peft_model_state_dict(model)), described


def adapter_of(model: Any = None) -> TransformerAdapter:
    return TransformerAdapter(tiny_sd3(9, layers=1) if model is None else model, CPU)


# The contract.


def test_three_versions_are_proved(publish: Publish) -> None:
    model = tiny_sd3(9, layers=1)
    check_loads([adapter_of(model)], (publish(weights(seed)) for seed in range(3)))
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights(2)[name]), name


def test_a_staged_version_is_served_at_its_commit(publish: Publish) -> None:
    check_stages([adapter_of()], publish(weights(1)), publish(weights(2)))


def test_a_load_waits_for_the_device(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_of()
    order = order_of_loads(adapter, monkeypatch)
    report, _ = ServingRank(adapter).load(encode(publish(weights(1))), PIECE_BYTES)
    assert order == ["synchronize", "commit"] and report.tensors_proved == len(weights(1))


def test_adapters_of_three_versions_are_proved_and_computed_with(publish: Publish) -> None:
    served = tiny_sd3(0, layers=1)
    trained = [trained_adapter(seed) for seed in range(3)]
    check_loads([adapter_of(served)], (publish(tensors, said) for _, tensors, said in trained))
    x = torch.randn(8, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    given = {name: value.expand(8, *value.shape) for name, value in tiny_conditions().items()}
    velocity, sigma = StableDiffusion3().velocity, torch.full((8,), 0.5)
    with torch.no_grad():
        found = velocity(served, x, sigma, given)
        assert torch.equal(found, velocity(trained[2][0], x, sigma, given))
        assert not torch.equal(found, velocity(tiny_sd3(0, layers=1), x, sigma, given))


def test_a_staged_adapter_is_served_at_its_commit(publish: Publish) -> None:
    (_, first, said), (_, second, _) = trained_adapter(1), trained_adapter(2)
    check_stages([adapter_of()], publish(first, said), publish(second, said))


# What is left out.


def leaving_out(adapter: TransformerAdapter, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make its load skip a tensor."""
    load = adapter.load

    def skip(pieces: Iterable[Sequence[tuple[str, torch.Tensor]]]) -> None:
        load([one for one in piece if one[0] != name] for piece in pieces)

    monkeypatch.setattr(adapter, "load", skip)


@pytest.mark.parametrize("name", [WEIGHT, BUFFER], ids=["tensor", "buffer"])
def test_a_tensor_that_is_not_loaded(publish: Publish, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_of()
    leaving_out(adapter, name, monkeypatch)
    with pytest.raises(ProofError, match=f"{name} was published, but the engine did not load it"):
        prove_first([adapter], publish(weights(1)))


@pytest.mark.parametrize("name", [WEIGHT, BUFFER], ids=["tensor", "buffer"])
def test_a_tensor_that_is_not_published(publish: Publish, name: str) -> None:
    tensors = weights(1)
    del tensors[name]
    with pytest.raises(ProofError, match=f"{name} is served, but its element 0 comes from no published"):
        prove_first([adapter_of()], publish(tensors))


def test_a_tensor_that_the_model_does_not_have(publish: Publish) -> None:
    with pytest.raises(ProofError, match="extra.weight was published, but no rank of the replica serves"):
        prove_first([adapter_of()], publish({**weights(1), "extra.weight": torch.ones(3)}))


def test_values_that_do_not_take(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_sd3(9, layers=1)
    adapter = adapter_of(model)
    monkeypatch.setattr(adapter, "finish", lambda: model.get_buffer(BUFFER).add_(1))
    with pytest.raises(ProofError, match=f"{BUFFER} is served with values other than the published ones"):
        prove_first([adapter], publish(weights(1)))


def test_a_model_of_another_size(publish: Publish) -> None:
    tensors = weights(1)
    tensors[WEIGHT] = tensors[WEIGHT][:1]
    with pytest.raises(WeightSyncError, match=rf"{WEIGHT} was published as \(1, 16\), but is served as"):
        prove_first([adapter_of()], publish(tensors))


def test_a_part_of_an_adapter_that_is_not_loaded(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, (_, tensors, said) = adapter_of(), trained_adapter(1)
    leaving_out(adapter, ADAPTER, monkeypatch)
    with pytest.raises(ProofError, match=f"{ADAPTER} was published, but the engine did not load it"):
        prove_first([adapter], publish(tensors, said))


def test_a_part_of_an_adapter_that_is_not_published(publish: Publish) -> None:
    _, tensors, said = trained_adapter(1)
    del tensors[ADAPTER]
    with pytest.raises(ProofError, match=f"{ADAPTER} is served, but its element 0 comes from no published"):
        prove_first([adapter_of()], publish(tensors, said))


def switched_off(module: Any) -> None:
    module.enable_adapters(False)


def merged(module: Any) -> None:
    module.merge()


def scaled(module: Any) -> None:
    module.set_scale("default", 0.5)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (switched_off, "the adapter of .*to_q is loaded, but not active"),
        (merged, "the adapter of .*to_q is loaded, but not active"),
        (scaled, "the adapter of .*to_q is scaled by 1.0 instead of 2.0"),
    ],
)
def test_an_adapter_that_is_not_computed_with(
    publish: Publish, fault: Callable[[Any], None], error: str
) -> None:
    model, (_, tensors, said) = tiny_sd3(0, layers=1), trained_adapter(1)
    adapter = adapter_of(model)
    assert prove_first([adapter], publish(tensors, said)) == [len(tensors)]
    fault(model.get_submodule("transformer_blocks.0.attn.to_q"))
    with pytest.raises(ProofError, match=error):
        prove_first([adapter], publish(tensors, said))


# What cannot be loaded.


def test_a_model_keeps_the_kind_of_its_versions(publish: Publish) -> None:
    adapter, (_, tensors, said) = adapter_of(), trained_adapter(1)
    prove_first([adapter], publish(weights(1)))
    with pytest.raises(WeightSyncError, match="brings an adapter .* before, which brought all weights"):
        adapter.commit(publish(tensors, said), 512)


def test_a_model_keeps_the_configuration_of_its_adapter(publish: Publish) -> None:
    adapter, (_, tensors, said) = adapter_of(), trained_adapter(1)
    prove_first([adapter], publish(tensors, said))
    _, other, said_otherwise = trained_adapter(1, lora_alpha=16)
    with pytest.raises(WeightSyncError, match="configuration other than that of the versions before"):
        adapter.commit(publish(other, said_otherwise), 512)
    assert not adapter.prepare(publish(other, said_otherwise))


def test_another_kind_of_adapter_is_refused(publish: Publish) -> None:
    _, tensors, said = trained_adapter(1)
    other = json.dumps({**json.loads(said), "peft_type": "IA3"})
    with pytest.raises(WeightSyncError, match="is a IA3 adapter; only plain LoRA is loaded"):
        adapter_of().commit(publish(tensors, other), 512)
