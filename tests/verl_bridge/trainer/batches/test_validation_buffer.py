# SPDX-License-Identifier: Apache-2.0
"""A validation lists its own partition only, less often the longer it waits, and returns what verl's does."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.fixture
def module(load: Load) -> Any:
    return load("recipe.async_pipeline.verl_bridge.trainer.batches.data_rows")


class Store:
    """A sample store whose prompts end one after another, and a clock that only sleeping advances."""

    def __init__(self, ends_s: list[float]) -> None:
        self.now, self.ends_s = 0.0, ends_s
        self.listed: list[float] = []
        self.cleared: list[str] = []
        self.training = {
            f"t{i}": {"is_prompt": True, "status": "running", "global_steps": 1} for i in range(9)
        }

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        self.listed.append(self.now)
        val: dict[str, dict[str, Any]] = {}
        for i, end in enumerate(self.ends_s):
            status = "running" if self.now < end else "failure" if i == 1 else "finished"
            val[f"v{i}"] = {"is_prompt": True, "status": status, "global_steps": 4}
            if status == "finished":
                val |= {f"v{i}_{k}_0": {"status": "success", "seq_len": k} for k in range(2)}
        partitions = {"train": self.training, "val": val}
        return copy.deepcopy(partitions if partition_id is None else {partition_id: partitions[partition_id]})

    def kv_clear(self, *, keys: list[str], partition_id: str) -> None:
        assert partition_id == "val"
        self.cleared += keys


def sampled(module: Any, monkeypatch: pytest.MonkeyPatch, store: Store, size: int) -> Any:
    monkeypatch.setattr(module.tq, "kv_list", store.kv_list)
    monkeypatch.setattr(module.tq, "kv_clear", store.kv_clear)
    batch, metrics = module.ValidationBuffer(lambda: store.now, store.sleep).sample(4, "val", size)
    assert metrics == {}
    return batch


def test_it_returns_the_responses_of_verls_buffer(
    module: Any, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    verls = load("verl.trainer.ppo.v1.replay_buffer")
    store = Store([0.0, 0.0, 0.0])
    ours = sampled(module, monkeypatch, store, 3)
    buffer = verls.ReplayBufferAsync("async", {}, None, "drop", {}, refill_fn=lambda count: None)
    theirs, _ = buffer.sample(global_steps=4, partition_id="val", batch_size=3)

    assert ours.keys == theirs.keys == ["v0_0_0", "v0_1_0", "v2_0_0", "v2_1_0"]
    assert ours.tags == theirs.tags
    assert sorted(store.cleared) == sorted(["v0", "v1", "v2"] * 2)


def test_it_never_lists_other_partitions(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store([1.0, 2.0])
    asked: list[str | None] = []
    listing = store.kv_list

    def kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        asked.append(partition_id)
        return listing(partition_id)

    monkeypatch.setattr(store, "kv_list", kv_list)
    sampled(module, monkeypatch, store, 2)
    assert set(asked) == {"val"}


def test_it_looks_less_often_the_longer_it_waits(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store([600.0])
    sampled(module, monkeypatch, store, 1)
    assert len(store.listed) < 400, "12,000 looks with an interval of 0.05 s"
    assert store.listed[-1] <= 602.0

    quick = Store([1.0])
    sampled(module, monkeypatch, quick, 1)
    assert quick.listed[-1] <= 1.1


def test_a_partition_without_keys_is_empty(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store([0.0])
    answers = [{}, store.kv_list("val")]
    monkeypatch.setattr(store, "kv_list", lambda partition_id: answers.pop(0))
    assert sampled(module, monkeypatch, store, 1).keys == ["v0_0_0", "v0_1_0"]
