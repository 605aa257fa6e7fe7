# SPDX-License-Identifier: Apache-2.0
"""A rank of an engine on several nodes maps the segments on its node only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.memory.manifest import BucketEntry, Manifest, encode, over_nodes
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.mark.parametrize("node", [0, 1])
def test_a_rank_maps_the_segments_on_its_node(load: Load, monkeypatch: pytest.MonkeyPatch, node: int) -> None:
    mapped: list[str] = []

    def commit(described: Manifest, piece_bytes: int) -> None:
        mapped.extend(bucket.segment for bucket in described.buckets)
        raise WeightSyncError("enough")

    module = load("recipe.async_pipeline.verl_bridge.rollout.vllm.worker")
    adapter = SimpleNamespace(commit=commit, prepare=lambda described, done: commit(described, 0))
    monkeypatch.setattr(module, "VllmAdapter", lambda worker: adapter)
    worker = object.__new__(module.PipelineWorkerExtension)
    worker.parallel_config = SimpleNamespace(node_rank=node)
    nodes = [Manifest(1, (), (BucketEntry(f"of node {one}", 0, 0),), ()) for one in range(2)]
    manifest = encode(over_nodes(nodes))
    with pytest.raises(WeightSyncError, match="enough"):
        worker.load_snapshot(manifest, 64)
    with pytest.raises(WeightSyncError, match="enough"):
        worker.stage_snapshot(manifest)
    assert mapped == [f"of node {node}"] * 2
