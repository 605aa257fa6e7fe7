# SPDX-License-Identifier: Apache-2.0
"""The contract of engine adapters, and every fault of a loader is a ProofError that names a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
import torch

from recipe.async_pipeline.errors import ProofError
from recipe.async_pipeline.weight_sync.engine import copy_plan
from recipe.async_pipeline.weight_sync.engine.engine_adapter import Delivered, Expected
from recipe.async_pipeline.weight_sync.engine.recording_adapter import RecordingAdapter, holds
from recipe.async_pipeline.weight_sync.engine.standby import StandbyCopy
from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest, TensorEntry
from recipe.async_pipeline.weight_sync.proof.element_map import View
from recipe.async_pipeline.weight_sync.proof.map_check import CheckedMap, check_map
from recipe.async_pipeline.weight_sync.proof.proof import Prover
from tests import HANG_S
from tests.fakes.adapter_contract import check_loads, check_stages, deliver
from tests.fakes.engine import (
    ATTENTION,
    BIAS,
    EMBED,
    EXPERT,
    LAYER,
    LM_HEAD,
    QUANTIZED,
    FakeEngine,
    Fault,
    Weights,
    shard_of_next_rank,
    skipping,
    swapping,
    weights,
)
from tests.fakes.simulated_device import SimulatedDevice, Stream, WrongMemory, simulated_device
from tests.fakes.waiting import until

_FP8 = torch.float8_e4m3fn
Publish = Callable[[Weights], Manifest]
SHAPES = [
    pytest.param(size, options, id=f"{size}-{'-'.join(options) or 'plain'}")
    for size in (1, 2, 4)
    for options in ({}, {"experts_apart": True}, {"tied": False}, {"names": False}, {"quantized": True})
]


@pytest.fixture
def publish() -> Iterator[Publish]:
    writer, version = ArenaWriter(1 << 12, 1000, None), iter(range(1, 100))

    def gather(tensors: Weights) -> Manifest:
        return await_manifest(writer.gather(next(version), tensors.items()), HANG_S)

    yield gather
    writer.close()


def replica(size: int, **options: Any) -> list[FakeEngine]:
    return [FakeEngine(rank, size, **options) for rank in range(size)]


def trained(options: dict[str, Any], version: int = 1, **more: Any) -> Weights:
    return weights(version, **{k: v for k, v in options.items() if k in ("tied", "quantized")}, **more)


def load(ranks: list[FakeEngine], manifest: Manifest) -> list[int]:
    return deliver(ranks, [Prover(len(ranks)) for _ in ranks], manifest)[1]


# The contract.


@pytest.mark.parametrize(("size", "options"), SHAPES)
def test_three_versions_are_proved(publish: Publish, size: int, options: dict[str, Any]) -> None:
    versions = (publish(trained(options, number)) for number in range(1, 4))
    check_loads(replica(size, **options), versions)


def test_a_loader_may_keep_a_tensor_until_another_comes(publish: Publish) -> None:
    def kept(engine: FakeEngine, given: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Load nothing in a call that does not get both; they are in two pieces."""
        return given if {EMBED, BIAS} <= {name for name, _ in given} else []

    (rank,) = replica(1)
    rank.fault = kept
    assert load([rank], publish(weights(1)))


@pytest.mark.parametrize(("size", "options"), SHAPES)
def test_a_staged_version_is_served_at_its_commit(
    publish: Publish, size: int, options: dict[str, Any]
) -> None:
    first, second = trained(options, 1), trained(options, 2)
    check_stages(replica(size, **options), publish(first), publish(second))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "options"), SHAPES)
def test_weights_on_a_device_are_loaded_staged_and_proved(
    publish: Publish, size: int, options: dict[str, Any]
) -> None:
    with simulated_device() as device:
        ranks = on_device(device, replica(size, **options))
        versions = (publish(trained(options, number)) for number in range(1, 4))
        check_loads(ranks, versions)
        check_stages(ranks, publish(trained(options, 4)), publish(trained(options, 5)))
        for rank in ranks:
            assert {tensor.device for tensor in rank.tensors().values()} == {rank.device}
    assert device.pinned, "copies from pageable memory are slower"


def on_device(device: SimulatedDevice, ranks: list[FakeEngine]) -> list[FakeEngine]:
    for index, rank in enumerate(ranks):
        rank.move(torch.device("cuda", index), device.adopt)
    return ranks


def test_a_loader_that_computes_with_host_memory_is_refused_by_the_device(
    publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    with simulated_device() as device:
        (rank,) = on_device(device, replica(1))
        monkeypatch.setattr(rank, "_load_rows", lambda name, tensor: rank.held[name][:90].mul_(tensor))
        with pytest.raises(WrongMemory, match=r"aten.mul_.Tensor runs on the device, .* in host memory"):
            load([rank], publish(weights(1)))


def test_a_staged_version_is_awaited(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the copies to the device had not ended at the commit, the proof would see it."""
    with simulated_device() as device:
        ranks = on_device(device, replica(1))
        load(ranks, publish(weights(1)))
        monkeypatch.setattr(Stream, "synchronize", lambda stream: None)
        with pytest.raises(ProofError, match="is served with values other than the published"):
            check_stages(ranks, publish(weights(2)), publish(weights(3)))


def test_a_version_of_another_layout_is_staged_by_its_own_record(publish: Publish) -> None:
    """The standby copy of the first layout would read the bytes of other tensors."""
    ranks = replica(1)
    check_stages(ranks, publish(weights(1)), publish(weights(2)))
    before, staged = (dict(reversed(weights(version).items())) for version in (3, 4))
    check_stages(ranks, publish(before), publish(staged))


def prepare_and_fail(adapter: FakeEngine, manifest: Manifest) -> BaseException | None:
    """Stage a version; return the error that is announced."""
    ends: list[BaseException | None] = []
    assert adapter.prepare(manifest, ends.append)
    until(lambda: bool(ends), "announced")
    return ends[0]


@pytest.mark.parametrize("where", ["allocation", "copy", "start"])
def test_a_version_whose_staging_fails_is_loaded_from_host_memory(
    publish: Publish, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    (adapter,) = ranks = replica(1)
    provers = [Prover()]
    deliver(ranks, provers, publish(weights(1)))

    def full(*args: object, **more: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as device:
        owner, name = {
            "allocation": (StandbyCopy, "_allocate"),
            "copy": (copy_plan, "copy_in_background"),
            "start": (StandbyCopy, "__init__"),
        }[where]
        device.setattr(owner, name, full)
        second = publish(weights(2))
        error = prepare_and_fail(adapter, second)
        assert isinstance(error, torch.OutOfMemoryError)
        assert error.__traceback__ is None or where == "start", "its frames hold device memory"
        assert deliver(ranks, provers, second)[1] == [len(second.samples)]
    third = publish(weights(3))
    assert prepare_and_fail(adapter, third) is None, "with enough memory it is staged again"
    assert adapter.staged_version() == 3
    assert deliver(ranks, provers, third)[1] == [len(third.samples)]


class Driver:
    """CUDA's runtime: knows which memory of this process is pinned."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def has(self, tensor: torch.Tensor) -> bool:
        return any(
            start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= start + nbytes
            for start, nbytes in self.pinned.items()
        )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    return made


PAGES = 1 << 15
"""Elements of a tensor of several pages."""


class Pinning(RecordingAdapter):
    """One of two ranks on a device with CUDA: serves rows of one tensor, columns of another, and no third."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda"))
        self.rows, self.columns = torch.zeros(8, PAGES).bfloat16(), torch.zeros(16, PAGES // 2).bfloat16()
        self.computes = False

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"rows": self.rows, "columns": self.columns}

    def load(self, pieces: Iterable[Sequence[tuple[str, torch.Tensor]]]) -> None:
        for name, given in chain.from_iterable(pieces):
            if name == "rows":
                self.rows.copy_(given[8:].clone() if self.computes else given[8:])
            elif name == "columns":
                self.columns.copy_(given[:, PAGES // 2 :])

    def finish(self) -> None:
        pass

    def seal(self) -> None:
        pass


@pytest.fixture
def large() -> Iterator[Callable[[bool], Manifest]]:
    """A function that publishes a version, in one of two orders, each of whose tensors fills a bucket."""
    writer, version = ArenaWriter(16 * PAGES * 2, 4, None), iter(range(1, 100))

    def gather(reverse: bool = False) -> Manifest:
        tensors = [(name, torch.randn(16, PAGES).bfloat16()) for name in ("rows", "columns", "other")]
        return await_manifest(writer.gather(next(version), tensors[::-1] if reverse else tensors), HANG_S)

    yield gather
    writer.close()


def test_only_what_a_rank_copies_directly_is_pinned_and_not_during_a_commit(
    large: Callable[..., Manifest], driver: Driver
) -> None:
    adapter = Pinning()
    for number in (1, 2):  # each arena
        manifest = large()
        adapter.commit(manifest, 1 << 30)
        until(lambda n=number: len(driver.pinned) == n, "pinned in a thread")  # type: ignore[misc]
        published = adapter.published(manifest)
        assert driver.has(published["rows"][8:]) and not driver.has(published["rows"])
        assert sum(driver.pinned.values()) == number * 8 * PAGES * 2
    before = dict(driver.pinned)
    adapter.commit(large(), 1 << 30)
    assert driver.pinned == before

    other = large(True)
    monitored: list[int] = []
    load = adapter.load

    def monitoring(pieces: Iterable[Sequence[tuple[str, torch.Tensor]]]) -> None:
        monitored.append(len(driver.pinned))
        load(pieces)

    adapter.load = monitoring  # type: ignore[method-assign]
    adapter.commit(other, 1 << 30)
    assert set(monitored) == {1}, "CUDA refuses a copy that is pinned in part"


def test_a_loader_that_computes_reads_pinned_buckets(large: Callable[..., Manifest], driver: Driver) -> None:
    adapter = Pinning()
    adapter.computes = True
    adapter.commit(first := large(), 1 << 30)
    until(lambda: len(driver.pinned) == 2, "pinned in a thread")
    published = adapter.published(first)
    assert driver.has(published["rows"]) and driver.has(published["columns"])
    assert not driver.has(published["other"]), "this rank reads nothing of it"


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, _FP8, torch.float8_e5m2)
NARROW = [dtype for dtype in FLOATS if dtype.itemsize <= 2]


@pytest.mark.parametrize("narrow", NARROW, ids=str)
@pytest.mark.parametrize("wide", FLOATS, ids=str)
def test_a_wider_dtype_has_every_value_of_the_narrow_one(wide: torch.dtype, narrow: torch.dtype) -> None:
    """All bit patterns of the narrow one are tried."""
    word = torch.uint8 if narrow.itemsize == 1 else torch.int16
    patterns = torch.arange(1 << 8 * narrow.itemsize).to(word).view(narrow)
    numbers = patterns.double()
    same = patterns.to(wide).double() == numbers
    assert holds(wide, narrow) == bool(same[~numbers.isnan()].all())


@pytest.mark.parametrize("narrower", NARROW, ids=str)
def test_a_narrower_dtype_holds_no_wider_one(narrower: torch.dtype) -> None:
    assert not holds(narrower, torch.float32)
    assert not holds(narrower, torch.int8) and not holds(torch.int64, narrower)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_may_be_published_as_one(publish: Publish, size: int) -> None:
    assert load(replica(size), publish(weights(1, fused=True)))


def test_a_map_is_checked_once(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[Manifest] = []

    def counted(manifest: Manifest, delivered: Delivered) -> CheckedMap:
        checks.append(manifest)
        return check_map(manifest, delivered)

    monkeypatch.setattr("recipe.async_pipeline.weight_sync.proof.proof.check_map", counted)
    ranks = replica(1)
    provers = [Prover()]
    for version in range(1, 4):
        deliver(ranks, provers, publish(weights(version)))
    assert len(checks) == 1
    deliver(ranks, provers, publish(weights(4, fused=True)))
    assert len(checks) == 2, "another layout"


def test_an_engine_may_serve_the_embedding_as_head(publish: Publish) -> None:
    """Published under both names with the same values; the engine skips the head."""
    same = weights(1)
    same[LM_HEAD] = same[EMBED]
    ranks = replica(1)
    ranks[0].fault = skipping(LM_HEAD)
    assert load(ranks, publish(same)) == [len(same)]
    other = weights(1, tied=False)
    with pytest.raises(ProofError, match=f"{LM_HEAD} is served with values other than the published"):
        load(ranks, publish(other))


# What is wrong is a ProofError that names the tensor.


@pytest.mark.parametrize("name", weights(1, tied=False, quantized=True))
@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_a_tensor_that_the_loader_skips(publish: Publish, name: str, names: bool, size: int) -> None:
    ranks = replica(size, tied=False, quantized=True, names=names)
    for engine in ranks:
        engine.fault = skipping(name)
    with pytest.raises(ProofError, match=name):
        load(ranks, publish(weights(1, tied=False, quantized=True)))


@pytest.mark.parametrize("name", [n for n in weights(1, tied=False) if n != QUANTIZED])
def test_a_tensor_that_was_not_published(publish: Publish, name: str) -> None:
    fewer = weights(1, tied=False)
    del fewer[name]
    with pytest.raises(ProofError, match="is served, but its element"):
        load(replica(1, tied=False), publish(fewer))


def test_a_buffer_that_was_left_out_is_named(publish: Publish) -> None:
    fewer = weights(1)
    del fewer[BIAS]
    with pytest.raises(ProofError, match=f"{BIAS} is served, but its element 0 comes from no published"):
        load(replica(1), publish(fewer))


@pytest.mark.parametrize(
    "pair",
    [
        (f"{ATTENTION}.k_proj.weight", f"{ATTENTION}.v_proj.weight"),
        (f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight"),
        (f"{EXPERT}.0.gate_proj.weight", f"{EXPERT}.0.up_proj.weight"),
        (f"{EXPERT}.0.gate_proj.weight", f"{EXPERT}.1.gate_proj.weight"),
        (f"{EXPERT}.1.down_proj.weight", f"{EXPERT}.3.down_proj.weight"),
        (EMBED, LM_HEAD),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_tensors_that_changed_places(publish: Publish, pair: tuple[str, str], size: int) -> None:
    ranks = replica(size, tied=False)
    for engine in ranks:
        engine.fault = swapping(*pair)
    with pytest.raises(ProofError, match=f"({pair[0]}|{pair[1]}) is in the wrong place: its element 0 is"):
        load(ranks, publish(weights(1, tied=False)))


@pytest.mark.parametrize("experts_apart", [True, False])
def test_a_swapped_expert_of_an_engine_without_tables(publish: Publish, experts_apart: bool) -> None:
    ranks = replica(2, names=False, experts_apart=experts_apart)
    for engine in ranks:
        engine.fault = swapping(f"{EXPERT}.0.down_proj.weight", f"{EXPERT}.1.down_proj.weight")
    with pytest.raises(ProofError, match=rf"{EXPERT}.1.down_proj.weight is served out of order"):
        load(ranks, publish(weights(1)))


@pytest.mark.parametrize("names", [True, False])
def test_the_shard_of_another_rank(publish: Publish, names: bool) -> None:
    name = f"{ATTENTION}.o_proj.weight"
    ranks = replica(2, names=names)
    for engine in ranks:
        engine.fault = shard_of_next_rank(name)
    wrong = "in the wrong place" if names else "not in the order of the ranks"
    with pytest.raises(ProofError, match=f"{name} is {wrong}"):
        load(ranks, publish(weights(1)))


def test_fewer_elements_than_the_tables_say(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    """The map and the tables agree on the corners of the tensor, not on what is between them."""
    name = f"{ATTENTION}.o_proj.weight"
    (engine,) = replica(1)
    places = engine.expected

    def sparse(entry: TensorEntry) -> Expected | None:
        expected = places(entry)
        if entry.name != name or expected is None:
            return expected
        rows, columns = entry.shape
        ends = View(0, (2, columns), ((rows - 1) * columns, 1))
        return Expected(tuple(piece._replace(source=ends, target=ends) for piece in expected.pieces))

    monkeypatch.setattr(engine, "expected", sparse)
    with pytest.raises(
        ProofError, match=rf"{name} is in the wrong place: the engine loaded \d+ of its elements"
    ):
        load([engine], publish(weights(1)))


def test_an_expert_that_no_rank_serves(publish: Publish) -> None:
    ranks = replica(2, experts_apart=True, names=False)
    ranks[1].local = range(1, 3)
    ranks[1].fault = skipping(f"{EXPERT}.3.gate_proj.weight")
    with pytest.raises(ProofError, match=rf"{EXPERT}\.3\.\w+\.weight was published, but no rank"):
        load(ranks, publish(weights(1)))


def test_a_scale_that_was_not_written(publish: Publish) -> None:
    ranks = replica(1, quantized=True)
    ranks[0].skip_scale = True
    with pytest.raises(ProofError, match=f"{QUANTIZED}_scale is served with values other than"):
        load(ranks, publish(weights(1, quantized=True)))


def test_a_quantized_tensor_that_is_not_declared(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = replica(1, quantized=True)
    monkeypatch.setattr(ranks[0], "computed", lambda: ())
    with pytest.raises(ProofError, match=f"{QUANTIZED} was published, but the engine did not load it"):
        load(ranks, publish(weights(1, quantized=True)))


def test_a_narrower_dtype_that_is_not_declared(publish: Publish) -> None:
    ranks = replica(1)
    ranks[0].held["model.norm.weight"] = ranks[0].held["model.norm.weight"].to(dtype=_FP8)
    with pytest.raises(ProofError, match="model.norm.weight was published as bfloat16, .* float8_e4m3fn"):
        load(ranks, publish(weights(1)))


def half(name: str) -> Fault:
    def take(engine: FakeEngine, piece: list[Any]) -> list[Any]:
        for at, tensor in piece:
            if at == name:
                engine.held[name].data[: len(tensor) // 2].copy_(tensor[: len(tensor) // 2])
        return [(at, tensor) for at, tensor in piece if at != name]

    return take


@pytest.mark.parametrize("names", [True, False])
def test_a_tensor_that_is_half_loaded(publish: Publish, names: bool) -> None:
    ranks = replica(1, names=names)
    ranks[0].fault = half("model.norm.weight")
    lost = "element 15 is served as nothing" if names else "element 8 comes from no published tensor"
    with pytest.raises(ProofError, match=f"model.norm.weight .* {lost}"):
        load(ranks, publish(weights(1)))


def test_values_that_change_after_the_load(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = replica(1)
    monkeypatch.setattr(ranks[0], "finish", lambda: ranks[0].held[EMBED].add_(1))
    with pytest.raises(ProofError, match=f"{EMBED} is served with values other than the published ones"):
        load(ranks, publish(weights(1)))


def test_a_tensor_that_the_engine_repacks(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = replica(1)
    served = ranks[0].held

    def repack() -> None:
        served["model.norm.weight"] = served["model.norm.weight"].clone()

    monkeypatch.setattr(ranks[0], "finish", repack)
    with pytest.raises(ProofError, match="model.norm.weight has no served tensor to compare; the engine"):
        load(ranks, publish(weights(1)))
