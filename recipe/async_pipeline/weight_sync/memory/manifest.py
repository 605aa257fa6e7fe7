# SPDX-License-Identifier: Apache-2.0
"""The contents of one weight version. Manifests travel as typed msgpack, never as a pickle."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...errors import WeightSyncError

Count = Annotated[int, Meta(ge=0)]
Pid = Annotated[int, Meta(gt=0, lt=2**31)]
MAX_BYTES = 256 << 20
"""Largest accepted message. A manifest of 100,000 tensors needs a tenth of it."""
ITEM_BYTES = {
    **dict.fromkeys(
        (
            "bool",
            "int8",
            "uint8",
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
        ),
        1,
    ),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of one element, by torch's name of the dtype."""
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec. Text that is not UTF-8 raises another type."""
VALUES_PER_TENSOR = 64
"""Number of values that the verification compares in each sampled tensor."""

ALIGN = 64
"""Each tensor starts on a cache line, which suits every dtype."""


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor inside a bucket; offsets and sizes in bytes."""

    name: str
    shape: tuple[Count, ...]
    dtype: str
    bucket: int
    offset: int
    nbytes: int


class BucketEntry(msgspec.Struct, frozen=True):
    """One shared-memory segment and the checksum of its first `nbytes` bytes."""

    segment: str
    nbytes: Count
    xxh3: Count


class Sample(msgspec.Struct, frozen=True):
    """Values of one tensor at positions that follow from version and name; see `proof`."""

    name: str
    values: bytes


class WeightTicket(msgspec.Struct, frozen=True):
    """A gathered version; its manifest follows on a board in shared memory of the trainer's host.

    Tickets pass through Ray as they are; only verl's own protocol, which has a board for them, encodes
    them.
    """

    version: Count
    board: str
    pid: Pid
    """The process that will post the manifest."""
    num_bytes: Count
    gather_s: float
    host: str = ""
    """The training host whose memory holds it."""
    others: tuple[WeightTicket, ...] = ()
    """The shares of other training hosts, if the ranks are on several."""

    @property
    def shares(self) -> tuple[WeightTicket, ...]:
        """Return the tickets of all training hosts; a `Bucket` names a share by its index here."""
        return (msgspec.structs.replace(self, others=()), *self.others)


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Posted instead of a manifest."""

    reason: str


class Manifest(msgspec.Struct, frozen=True, tag=True):
    """A complete version: everything a receiver needs to map, check, load and verify it."""

    version: Count
    tensors: tuple[TensorEntry, ...]
    buckets: tuple[BucketEntry, ...]
    samples: tuple[Sample, ...]
    adapter: str | None = None
    """Set if the tensors are a LoRA adapter: peft's description of it, as JSON. The base never changes."""
    elsewhere: tuple[tuple[BucketEntry, ...], ...] = ()
    """The buckets in the memory of the further nodes of a consumer, in the order of its nodes."""

    @property
    def num_bytes(self) -> int:
        return sum(b.nbytes for b in self.buckets)

    def on_node(self, node: int) -> Manifest:
        """Return the manifest for the ranks on one node of a consumer, which map the segments of that node.

        Raises WeightSyncError if the version is not in the memory of that node.
        """
        if not node and not self.elsewhere:
            return self
        if node > len(self.elsewhere):
            raise WeightSyncError(
                f"v{self.version} is in the memory of {1 + len(self.elsewhere)} nodes of its consumer, and a "
                f"rank is on node {node}"
            )
        buckets = self.elsewhere[node - 1] if node else self.buckets
        return msgspec.structs.replace(self, buckets=buckets, elsewhere=())

    def pieces(self, piece_bytes: int) -> Iterator[tuple[TensorEntry, ...]]:
        """Yield the tensors in order, in runs of at most `piece_bytes`; larger tensors form their own run."""
        run: list[TensorEntry] = []
        size = 0
        for entry in self.tensors:
            if run and size + entry.nbytes > piece_bytes:
                yield tuple(run)
                run, size = [], 0
            run.append(entry)
            size += entry.nbytes
        if run:
            yield tuple(run)


class Block(msgspec.Struct, frozen=True):
    """A block of one tensor inside a bucket of a share; offset and size in bytes."""

    tensor: Count
    """Index of the tensor in `Share.tensors`."""
    start: tuple[Count, ...]
    """Index of its first element in the whole tensor."""
    shape: tuple[Count, ...]
    bucket: Count
    offset: Count
    nbytes: Count


class PartialSample(msgspec.Struct, frozen=True):
    """The values of a `Sample` that one training host holds."""

    name: str
    indices: tuple[Count, ...]
    """Which of the sample's values these are."""
    values: bytes


class Share(msgspec.Struct, frozen=True, tag=True):
    """The blocks of a version that the ranks of one training host hold; all shares form the version."""

    version: Count
    tensors: tuple[TensorEntry, ...]
    """Where the whole tensors are in a joined copy; the same in all shares."""
    blocks: tuple[Block, ...]
    buckets: tuple[BucketEntry, ...]
    samples: tuple[PartialSample, ...]
    adapter: str | None = None
    """See `Manifest`."""


Announcement = Manifest | Share
"""What a training host posts when a version is complete there."""


class Layout:
    """Where a version's tensors are: in order, in buckets, on cache lines. The same on all ranks."""

    def __init__(self, bucket_bytes: int) -> None:
        self.tensors: list[TensorEntry] = []
        self.used: list[int] = []
        """Bytes of each bucket."""
        self._bucket_bytes = bucket_bytes

    def place(self, name: str, shape: tuple[int, ...], dtype: str, itemsize: int) -> TensorEntry:
        """Add a tensor. A tensor larger than a bucket gets a separate bucket."""
        nbytes = math.prod(shape) * itemsize
        offset = -(-self.used[-1] // ALIGN) * ALIGN if self.used else 0
        if not self.used or offset + nbytes > self._bucket_bytes:
            self.used.append(0)
            offset = 0
        self.used[-1] = offset + nbytes
        entry = TensorEntry(name, shape, dtype, len(self.used) - 1, offset, nbytes)
        self.tensors.append(entry)
        return entry


def over_nodes(manifests: Sequence[Manifest]) -> Manifest:
    """Return one manifest for a consumer over several nodes, from the ones of its nodes in their order.

    Raises WeightSyncError if they do not describe the same version.
    """
    first, *others = manifests
    if not others:
        return first
    for node, other in enumerate(others, 1):
        if msgspec.structs.replace(other, buckets=first.buckets) != first:
            raise WeightSyncError(f"v{first.version} differs between node 0 and node {node} of its consumer")
    return msgspec.structs.replace(first, elsewhere=tuple(other.buckets for other in others))


def encode(message: Announcement | WeightTicket | Failure) -> bytes:
    """Return the message as typed msgpack."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Manifest:
    """Decode a manifest. Raises WeightSyncError if it is not one or contradicts itself."""
    return _checked(_decoded(data, Manifest, "weight manifest"))


def decode_ticket(data: bytes) -> WeightTicket:
    """Decode a ticket. Raises WeightSyncError if it is not one."""
    ticket: WeightTicket = _decoded(data, WeightTicket, "ticket of a weight version")
    return ticket


def decode_announcement(data: bytes) -> Announcement | Failure:
    """Decode a board's content. Raises WeightSyncError if it is of another type or contradicts itself."""
    found: Announcement | Failure = _decoded(data, Manifest | Share | Failure, "weight manifest")
    # Shares are checked together, when they are joined.
    return _checked(found) if isinstance(found, Manifest) else found


def joined(tickets: Sequence[WeightTicket]) -> WeightTicket:
    """Return one ticket for the shares of all training hosts."""
    first, *others = tickets
    return msgspec.structs.replace(
        first,
        others=tuple(others),
        num_bytes=sum(ticket.num_bytes for ticket in tickets),
        gather_s=max(ticket.gather_s for ticket in tickets),
    )


def _decoded(data: bytes, kind: Any, what: str) -> Any:
    if len(data) > MAX_BYTES:
        raise WeightSyncError(f"not a {what}: {len(data)} bytes, the limit is {MAX_BYTES}")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE as error:
        raise WeightSyncError(f"not a {what}: {error}") from error


def _checked(manifest: Manifest) -> Manifest:
    _check_adapter(manifest)
    by_name = {entry.name: entry for entry in manifest.tensors}
    if len(by_name) < len(manifest.tensors):
        raise WeightSyncError(f"manifest of v{manifest.version}: two of its tensors have the same name")

    for sample in manifest.samples:
        of = by_name.get(sample.name)
        if of is None or len(sample.values) != min(math.prod(of.shape), VALUES_PER_TENSOR) * ITEM_BYTES.get(
            of.dtype, 0
        ):
            raise WeightSyncError(
                f"manifest of v{manifest.version}: the sample of {sample.name} does not fit its tensor"
            )

    sizes = [bucket.nbytes for bucket in manifest.buckets]
    if any([bucket.nbytes for bucket in buckets] != sizes for buckets in manifest.elsewhere):
        raise WeightSyncError(f"manifest of v{manifest.version}: its buckets differ between nodes")

    check_sizes(manifest.version, manifest.tensors)
    for entry in manifest.tensors:
        in_range = 0 <= entry.bucket < len(manifest.buckets)
        if (
            not in_range
            or min(entry.offset, entry.nbytes) < 0
            or entry.offset + entry.nbytes > manifest.buckets[entry.bucket].nbytes
        ):
            raise WeightSyncError(f"manifest of v{manifest.version}: {entry.name} is outside its bucket")
    return manifest


def check_sizes(version: int, tensors: Sequence[TensorEntry]) -> None:
    """Raise WeightSyncError unless the size of each tensor follows from its shape and a known dtype."""
    for entry in tensors:
        if ITEM_BYTES.get(entry.dtype, -1) * math.prod(entry.shape) != entry.nbytes:
            raise WeightSyncError(
                f"manifest of v{version}: {entry.name} cannot have {entry.nbytes} bytes as "
                f"{entry.dtype} {list(entry.shape)}"
            )


def check_places(version: int, tensors: Sequence[TensorEntry]) -> None:
    """Raise WeightSyncError unless each tensor is where a `Layout` of some bucket size places it."""
    bucket, used = -1, 0
    for entry in tensors:
        behind = bucket, -(-used // ALIGN) * ALIGN
        if (entry.bucket, entry.offset) not in (behind, (bucket + 1, 0)) or entry.bucket < 0:
            raise WeightSyncError(
                f"manifest of v{version}: {entry.name} is not behind its predecessor, but at byte "
                f"{entry.offset} of bucket {entry.bucket}"
            )
        bucket, used = entry.bucket, entry.offset + entry.nbytes


def _check_adapter(manifest: Manifest) -> None:
    if manifest.adapter is None:
        return
    try:
        described = json.loads(manifest.adapter)
    except (ValueError, RecursionError):
        described = None
    if not isinstance(described, dict):
        raise WeightSyncError(
            f"manifest of v{manifest.version}: its adapter is not described by a JSON object"
        )
