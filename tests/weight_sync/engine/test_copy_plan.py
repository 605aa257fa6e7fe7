# SPDX-License-Identifier: Apache-2.0
"""A loader that only copies is recorded and repeated; any other continues to be called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.engine.copy_plan import RecordedLoad, Recorder
from recipe.async_pipeline.weight_sync.memory.arena import ArenaReader, ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest
from tests import HANG_S

Weights = Mapping[str, torch.Tensor]
Loader = Callable[["Served", Weights], None]


class Served(torch.nn.Module):
    """As an engine serves it: fused, padded, one of two ranks, in its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(10, 4))
        self.embedding = torch.nn.Parameter(torch.ones(16, 4))
        self.columns = torch.nn.Parameter(torch.zeros(6, 2))
        self.experts = torch.nn.Parameter(torch.zeros(2, 6, 3, dtype=torch.bfloat16))


def weights(version: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(version)
    return {
        "q": torch.randn(6, 4, generator=draw),
        "k": torch.randn(2, 4, generator=draw),
        "v": torch.randn(2, 4, generator=draw),
        "embedding": torch.randn(13, 4, generator=draw),
        "columns": torch.randn(6, 4, generator=draw),
        **{f"experts.{i}": torch.randn(6, 3, generator=draw) for i in range(2)},
    }


def load_weights(served: Served, published: Weights) -> None:
    """In the manner of vLLM's loaders."""
    start = 0
    for name in ("q", "k", "v"):
        height = published[name].shape[0]
        served.qkv.data.narrow(0, start, height).copy_(published[name])
        start += height
    served.embedding[:13].data.copy_(published["embedding"])
    served.embedding[13:].data.fill_(0)
    served.columns.data.copy_(published["columns"].chunk(2, dim=1)[1])
    for i in range(2):
        served.experts.data[i].copy_(published[f"experts.{i}"].view(6, 3))


@pytest.fixture
def writer() -> Iterator[ArenaWriter]:
    made = ArenaWriter(256, 2, None)
    yield made
    made.close()


def publish(writer: ArenaWriter, version: int) -> tuple[Manifest, dict[str, torch.Tensor]]:
    manifest = await_manifest(writer.gather(version, weights(version).items()), HANG_S)
    return manifest, ArenaReader().tensors(manifest)


def record(
    writer: ArenaWriter, served: Served, loader: Loader = load_weights
) -> tuple[RecordedLoad | None, str | None]:
    manifest, published = publish(writer, 0)
    with torch.no_grad(), Recorder(published) as recorder:
        loader(served, published)
    return recorder.recorded(manifest, published), recorder.other


def test_a_load_is_repeated_without_its_loader(writer: ArenaWriter) -> None:
    served, plain = Served(), Served()
    load, other = record(writer, served)
    assert load is not None, other
    for version in range(1, 5):
        manifest, published = publish(writer, version)
        assert load.fits(manifest, served.parameters())
        load.copy(manifest, published, load.targets)
        with torch.no_grad():
            load_weights(plain, weights(version))
        for (name, found), wanted in zip(served.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(found, wanted), name
        assert load.took(manifest, published)


def test_other_targets_are_written_in_their_place(writer: ArenaWriter) -> None:
    served = Served()
    load, _ = record(writer, served)
    assert load is not None
    before = [parameter.detach().clone() for parameter in served.parameters()]
    elsewhere = [torch.empty_like(target) for target in load.targets]
    manifest, published = publish(writer, 1)
    load.copy(manifest, published, elsewhere)
    assert torch.equal(elsewhere[0], weights(1)["q"])
    assert all(torch.equal(a, b) for a, b in zip(served.parameters(), before, strict=True))


def scaled(served: Served, published: Weights) -> None:
    served.qkv.data.copy_(torch.cat([published[n] for n in "qkv"]) * 2)


def counted(served: Served, published: Weights) -> None:
    load_weights(served, published)
    served.qkv.data.mul_(2)


def decided(served: Served, published: Weights) -> None:
    if published["q"].sum().item() > 1e9:
        return
    load_weights(served, published)


def from_elsewhere(served: Served, published: Weights) -> None:
    load_weights(served, published)
    served.embedding.data.copy_(torch.ones(16, 4))


def nothing(served: Served, published: Weights) -> None:
    pass


@pytest.mark.parametrize("loader", [scaled, counted, decided, from_elsewhere, nothing])
def test_what_is_more_than_copies_is_not_repeated(writer: ArenaWriter, loader: Loader) -> None:
    load, _ = record(writer, Served(), loader)
    assert load is None


def test_the_first_other_operation_is_named(writer: ArenaWriter) -> None:
    _, other = record(writer, Served(), counted)
    assert other == "aten.mul_.Tensor"


def test_an_operation_without_tensors_is_no_part_of_a_load(writer: ArenaWriter) -> None:
    """The garbage collector may call the finalizer of an engine's kernel at any moment."""
    library = torch.library.Library("copy_plan", "FRAGMENT")
    library.define("release(int handle) -> ()")
    library.impl("release", lambda handle: None, "CompositeExplicitAutograd")

    def collected(served: Served, published: Weights) -> None:
        torch.ops.copy_plan.release(1)
        load_weights(served, published)

    load, other = record(writer, Served(), collected)
    assert load is not None and other is None


def test_what_was_changed_after_the_load_is_not_repeated(writer: ArenaWriter) -> None:
    served = Served()
    manifest, published = publish(writer, 0)
    with torch.no_grad(), Recorder(published) as recorder:
        load_weights(served, published)
    with torch.no_grad():
        served.columns[0, 0] += 1  # as an engine that packs or scales its weights afterwards
    assert recorder.recorded(manifest, published) is None


def test_another_layout_or_other_parameters_do_not_fit(writer: ArenaWriter) -> None:
    served = Served()
    load, _ = record(writer, served)
    assert load is not None
    fewer = await_manifest(writer.gather(1, list(weights(1).items())[:-1]), HANG_S)
    assert not load.fits(fewer, served.parameters())
    same, _ = publish(writer, 2)
    assert load.fits(same, served.parameters())
    served.qkv.data = served.qkv.data.clone()
    assert not load.fits(same, served.parameters()), "it would write memory that is not served"


def test_what_a_loader_clears_is_served_as_zeros_and_stays_published() -> None:
    """On all ranks but one, gpt-oss clears the bias that the ranks' sum would have several times."""
    published = {"bias": torch.ones(2, 4), "weight": torch.ones(4)}
    served = {"bias": torch.full((2, 4), 5.0), "weight": torch.full((4,), 5.0)}
    with torch.no_grad(), Recorder(published) as recorder:
        served["bias"].copy_(published["bias"].zero_())
        served["weight"].copy_(published["weight"])
    assert bool((published["bias"] == 1).all()), "other replicas load the same memory"
    assert bool((served["bias"] == 0).all())
    learned = recorder.elements(served)
    assert learned.pieces.keys() == {"weight"}
    assert learned.constant.keys() == {"bias"}


@pytest.mark.parametrize(
    "change", [lambda t: t.mul_(2), lambda t: t.copy_(torch.zeros(2, 4)), lambda t: t[:, 1].zero_()]
)
def test_a_loader_must_not_change_what_is_published(change: Callable[[torch.Tensor], object]) -> None:
    published = {"bias": torch.ones(2, 4)}
    with pytest.raises(WeightSyncError, match="the engine's loader changes bias in place"):
        with torch.no_grad(), Recorder(published):
            change(published["bias"])
    assert bool((published["bias"] == 1).all())
