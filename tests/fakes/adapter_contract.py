# SPDX-License-Identifier: Apache-2.0
"""What every engine adapter must do; `ranks` are the adapters of one replica, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch

from recipe.async_pipeline.weight_sync.engine.engine_adapter import Delivered, EngineAdapter
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest
from recipe.async_pipeline.weight_sync.proof.map_check import check_union
from recipe.async_pipeline.weight_sync.proof.proof import Prover, to_bytes
from tests.fakes.waiting import until

PIECE_BYTES = 512


def deliver(
    ranks: Sequence[EngineAdapter], provers: Sequence[Prover], manifest: Manifest
) -> tuple[list[Delivered], list[int]]:
    """Load and verify one version on all ranks; return what they serve, and how many tensors each proved."""
    served, proved, shares = [], [], []
    for adapter, prover in zip(ranks, provers, strict=True):
        with torch.no_grad():
            delivered = adapter.commit(manifest, PIECE_BYTES)

        def published(adapter: EngineAdapter = adapter) -> dict[str, torch.Tensor]:
            return dict(adapter.published(manifest))

        found = prover.prove(manifest, delivered, published)
        adapter.seal()
        served.append(delivered)
        proved.append(found.tensors)
        shares += [found.share] if found.share is not None else []
    check_union(manifest.version, shares)
    return served, proved


def order_of_loads(adapter: EngineAdapter, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets each synchronization of the CPU as a device, and each commit of an adapter."""
    calls: list[str] = []
    commit = adapter.commit

    def noted(manifest: Manifest, piece_bytes: int) -> Delivered:
        calls.append("commit")
        return commit(manifest, piece_bytes)

    monkeypatch.setattr(torch.cpu, "synchronize", lambda device=None: calls.append("synchronize"))
    monkeypatch.setattr(adapter, "commit", noted)
    return calls


def prove_first(ranks: Sequence[EngineAdapter], manifest: Manifest) -> list[int]:
    """Load and verify a version as the first of its layout; return how many tensors each rank proved."""
    return deliver(ranks, [Prover(len(ranks)) for _ in ranks], manifest)[1]


def check_loads(ranks: Sequence[EngineAdapter], versions: Iterable[Manifest]) -> None:
    """Versions of one layout, loaded one after another: each is proved, and the map is learned once."""
    provers = [Prover(len(ranks)) for _ in ranks]
    elements = []
    for manifest in versions:
        served, proved = deliver(ranks, provers, manifest)
        assert min(proved) > 0
        assert max(proved) == len(manifest.samples) or len(ranks) > 1
        elements.append([delivered.elements for delivered in served])
        for delivered in served:
            check_description(delivered, manifest)
    assert all(of_version == elements[0] for of_version in elements)


def check_description(delivered: Delivered, manifest: Manifest) -> None:
    """The map names nothing that is not published or not served."""
    published = {entry.name for entry in manifest.tensors}
    assert delivered.elements.pieces.keys() <= published
    for pieces in delivered.elements.pieces.values():
        for piece in pieces:
            assert piece.served in delivered.tensors
            assert piece.source.numel == piece.target.numel > 0
    assert {name for computed in delivered.computed for name in computed.sources} <= published


def check_stages(ranks: Sequence[EngineAdapter], before: Manifest, staged: Manifest) -> None:
    """A version that was prepared is not served before its commit, and is afterwards.

    An engine that cannot prepare returns False, and its commit does the whole load.
    """
    provers = [Prover(len(ranks)) for _ in ranks]
    served, _ = deliver(ranks, provers, before)
    kept = [{name: t.clone() for name, t in delivered.tensors.items()} for delivered in served]
    for adapter in ranks:
        ends: list[BaseException | None] = []
        if adapter.prepare(staged, ends.append):
            until(lambda ends=ends: bool(ends), "announced")  # type: ignore[misc]
            assert ends == [None]
            until(lambda one=adapter: one.staged_version() == staged.version, "staged")  # type: ignore[misc]
        else:
            assert adapter.staged_version() is None
    for delivered, values in zip(served, kept, strict=True):
        for name, tensor in delivered.tensors.items():
            # Bit for bit: what a kernel pads with may be no number.
            same = to_bytes(tensor.reshape(-1)) == to_bytes(values[name].reshape(-1))
            assert same, f"{name} changed before the commit"
    deliver(ranks, provers, staged)
    assert all(adapter.staged_version() is None for adapter in ranks)
