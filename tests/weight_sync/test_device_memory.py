# SPDX-License-Identifier: Apache-2.0
"""Weights move between host and device memory by copies only, and each copy is awaited before it is used.

The device is simulated (`tests/fakes/simulated_device.py`). Adapters of engines have the same tests in
`test_engine_adapter.py` and in the tests of each engine's adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from recipe.async_pipeline.errors import ProofError
from recipe.async_pipeline.weight_sync.engine.shard_load import load_parts, prove_parts
from recipe.async_pipeline.weight_sync.memory.arena import ArenaReader, ArenaWriter, HeldBlock
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest, WeightTicket
from recipe.async_pipeline.weight_sync.memory.memory_work import copy_all
from tests import HANG_S
from tests.fakes.simulated_device import DEVICE, SimulatedDevice, WrongMemory, simulated_device

Weights = dict[str, torch.Tensor]


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulated_device() as simulated:
        yield simulated


@pytest.fixture
def writer() -> Iterator[ArenaWriter]:
    made = ArenaWriter(1 << 12, 100, torch.bfloat16)
    yield made
    made.close()


def weights(version: int) -> Weights:
    draw = torch.Generator().manual_seed(version)
    return {
        "embed": torch.randn(40, 6, generator=draw),
        "norm": torch.randn(6, generator=draw),
        "experts": torch.randn(4, 5, 3, generator=draw).transpose(1, 2),
        "large": torch.randn(3000, generator=draw),
        "steps": torch.tensor(3.0 + version),
    }


SECOND = torch.device(DEVICE.type, 1)
"""Not the current device, so that calls without a device mean another one."""


def on_device(tensors: Weights) -> Weights:
    return {name: tensor.to(SECOND) for name, tensor in tensors.items()}


def gather_whole(writer: ArenaWriter, version: int, tensors: Weights) -> WeightTicket:
    return writer.gather(version, tensors.items())


def gather_parts(writer: ArenaWriter, version: int, tensors: Weights) -> WeightTicket:
    ticket = writer.gather_parts(version, parts_of(tensors))
    assert ticket is not None
    return ticket


def parts_of(tensors: Weights) -> list[HeldBlock]:
    return [HeldBlock(n, tuple(t.shape), t.dtype, (0,) * t.dim(), t) for n, t in tensors.items()]


Gather = Callable[[ArenaWriter, int, Weights], WeightTicket]
both_ways = pytest.mark.parametrize("gather", [gather_whole, gather_parts])


def different(manifest: Manifest, version: int) -> list[str]:
    """Return the tensors whose published values are not the trained ones."""
    found = ArenaReader().tensors(manifest)
    return [n for n, t in weights(version).items() if not torch.equal(found[n], t.bfloat16())]


# The trainer's side.


@both_ways
def test_what_is_on_the_device_is_published(
    device: SimulatedDevice, writer: ArenaWriter, gather: Gather
) -> None:
    """The first version has new memory, the second too, the third reuses the first one's."""
    for version in range(1, 4):
        manifest = await_manifest(gather(writer, version, on_device(weights(version))), HANG_S)
        assert different(manifest, version) == []
        ArenaReader().verify(manifest)
    # Whole tensors arrive one by one; the first version tells how much of the memory is used.
    assert sum(device.pinned) >= sum(bucket.nbytes for bucket in manifest.buckets)


@both_ways
def test_a_version_is_not_published_before_its_copies_end(
    device: SimulatedDevice, writer: ArenaWriter, gather: Gather, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above would see it if the trainer did not wait."""
    with monkeypatch.context() as hasty:
        hasty.setattr(torch.cuda, "synchronize", lambda device: None)
        manifest = await_manifest(gather(writer, 1, on_device(weights(1))), HANG_S)
    assert set(different(manifest, 1)) == set(weights(1))


def test_the_trainers_tensors_may_be_in_both_memories(device: SimulatedDevice, writer: ArenaWriter) -> None:
    mixed = weights(1) | {"embed": weights(1)["embed"].to(SECOND)}
    assert different(await_manifest(gather_parts(writer, 1, mixed), HANG_S), 1) == []
    assert different(await_manifest(gather_whole(writer, 2, mixed), HANG_S), 1) == []


# A model of the trainer's own kind, as pools for log-probs have.


def test_a_model_on_the_device_takes_and_proves_a_version(
    device: SimulatedDevice, writer: ArenaWriter
) -> None:
    manifest = await_manifest(gather_whole(writer, 7, on_device(weights(7))), HANG_S)
    held = on_device(weights(8))
    load_parts(7, ArenaReader().tensors(manifest), parts_of(held))
    assert prove_parts(manifest, parts_of(held)) == len(held)
    assert all(torch.equal(held[n].cpu(), t.bfloat16().float()) for n, t in weights(7).items())
    held["norm"].add_(1)
    with pytest.raises(ProofError, match="norm differs"):
        prove_parts(manifest, parts_of(held))


def test_parts_of_the_published_type_are_copied_by_the_device_and_awaited(device: SimulatedDevice) -> None:
    """Tensors of one type could also be copied byte by byte, on the host, without an error of PyTorch."""
    published = {name: tensor.bfloat16() for name, tensor in weights(7).items()}
    held = on_device({name: torch.zeros_like(tensor) for name, tensor in published.items()})
    load_parts(7, published, parts_of(held))
    assert not any(stream.pending for stream in device.all_streams())
    assert all(torch.equal(held[name].cpu(), tensor) for name, tensor in published.items())


# The simulation.


def test_the_host_and_the_device_do_not_read_each_others_memory(device: SimulatedDevice) -> None:
    host = torch.arange(4.0)
    there = torch.nn.Parameter(host.to("cuda"), requires_grad=False)
    assert there.device == there[1:].device == (there * 2).device == torch.zeros(0, device=DEVICE).device
    assert there.is_cuda and not host.is_cuda and not there.cpu().is_cuda
    mixing: list[Callable[[], object]] = [
        lambda: there + host,
        lambda: torch.equal(there, host),
        lambda: torch.cat([there, host]),
        lambda: host[there.long()],
        lambda: copy_all([host], [there.data]),
        lambda: copy_all([there.data, host], [host, there.data]),
    ]
    for mix in mixing:
        with pytest.raises(WrongMemory):
            mix()
    with pytest.raises(TypeError, match="copy it to host memory first"):
        there.numpy()
    assert (there + host[1]).cpu().tolist() == [1.0, 2.0, 3.0, 4.0], "one number is an argument of the kernel"
    assert there[torch.tensor([3])].item() == 3.0


def test_two_devices_read_each_others_memory_by_copies_only(device: SimulatedDevice) -> None:
    first, second = torch.ones(4, device="cuda:0"), torch.zeros(4, device="cuda:1")
    assert (second + second[:1]).device == second.clone().device == torch.device("cuda", 1)
    mixing: list[Callable[[], object]] = [
        lambda: first + second,
        lambda: torch.equal(first, second),
        lambda: second.add_(first),
        lambda: first[second.long()],
    ]
    for mix in mixing:
        with pytest.raises(WrongMemory, match="of the devices 0, 1"):
            mix()
    assert torch.equal(first.to(second), second.copy_(first))
    assert first.to("cuda:1").device == second.device and first.to("cuda") is first


def test_a_copy_ends_with_its_stream(device: SimulatedDevice) -> None:
    there, host = torch.ones(4, device=DEVICE), torch.zeros(4)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        host.copy_(there, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert host.sum() == 0, "another stream"
    stream.synchronize()
    assert host.sum() == 4


def test_each_device_has_its_own_streams(device: SimulatedDevice) -> None:
    there, host = torch.ones(4, device="cuda:1"), torch.zeros(4)
    host.copy_(there, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    assert host.sum() == 0, "these are the first device's"
    torch.cuda.current_stream(there.device).synchronize()
    assert host.sum() == 4
    with torch.cuda.stream(torch.cuda.Stream()):
        with pytest.raises(WrongMemory, match="on the device 1 ran in a stream of 0"):
            host.copy_(there, non_blocking=True)
    with torch.cuda.stream(torch.cuda.Stream(there.device)):
        host.add_(1).copy_(there, non_blocking=True)
        assert host.sum() == 8, "its stream has not ended"
        torch.cuda.synchronize()
    assert host.sum() == 4
