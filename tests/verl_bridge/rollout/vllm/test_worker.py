# SPDX-License-Identifier: Apache-2.0
"""A worker serves through the class that knows when weights may be overwritten."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import encode, over_nodes
from tests import HANG_S
from tests.conftest import Load
from tests.fakes.adapter_contract import PIECE_BYTES, order_of_loads
from tests.fakes.engine import FakeEngine, weights

pytestmark = pytest.mark.real_engine


@pytest.mark.parametrize("node", [0, 1])
def test_a_load_waits_for_the_device_and_reads_the_memory_of_its_node(
    load: Load, monkeypatch: pytest.MonkeyPatch, node: int
) -> None:
    module = load("recipe.async_pipeline.verl_bridge.rollout.vllm.worker")
    monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)
    adapter = FakeEngine()
    order = order_of_loads(adapter, monkeypatch)
    # It would end the tests with the process that started them.
    monkeypatch.setattr(load("verl.workers.rollout.vllm_rollout.utils"), "set_death_signal", lambda: None)
    worker = module.PipelineWorkerExtension()
    worker.adapter_class = lambda worker: adapter
    worker.parallel_config = SimpleNamespace(node_rank=node)
    with closing(ArenaWriter(1 << 12, 1000, None)) as writer:
        own = await_manifest(writer.gather(1, weights(1).items()), HANG_S)
        gone = replace(own, buckets=tuple(replace(one, segment="of another node") for one in own.buckets))
        nodes = [own, gone] if node == 0 else [gone, own]
        report, share = worker.load_snapshot(encode(over_nodes(nodes)), PIECE_BYTES)
    assert order == ["synchronize", "commit"]
    assert report["tensors_proved"] == len(weights(1)) and share is None
