# SPDX-License-Identifier: Apache-2.0
"""Updates in which a router would choose by itself are refused; `test_engine.py` has the replay itself."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.async_pipeline.errors import RoutingError
from tests.conftest import Load

pytestmark = pytest.mark.real_engine
WORKERS = "recipe.async_pipeline.verl_bridge.workers"


def engine_config(mode: str) -> Any:
    return SimpleNamespace(router_replay=SimpleNamespace(mode=mode), strategy="fsdp2")


@pytest.fixture(autouse=True)
def only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "", "MASTER_PORT": ""}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def replay(load: Load) -> ModuleType:
    """The module itself does not import Megatron."""
    return load(f"{WORKERS}.megatron.replay")


def test_engines_replay_if_their_config_says_so(replay: ModuleType) -> None:
    assert replay.replays(engine_config("R2"))
    assert not replay.replays(engine_config("disabled"))
    assert not replay.replays(SimpleNamespace()) and not replay.replays(None)


@pytest.mark.parametrize("mode", ["R2", "disabled"])
def test_the_worker_asks_before_it_trains(load: Load, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(f"{WORKERS}.training_worker")
    engine = SimpleNamespace(
        module=[torch.nn.Linear(1, 1)],
        get_data_parallel_rank=lambda: 0,
        is_mp_src_rank_with_outputs=lambda: True,
    )
    verls = load("verl.workers.engine_workers")
    monkeypatch.setattr(verls, "initialize_global_process_group_ray", lambda **how: None)
    monkeypatch.setattr(load("verl.workers.engine").EngineRegistry, "new", lambda **parts: engine)
    parts = dict.fromkeys(("optimizer_config", "checkpoint_config", "profiler_config"))
    model = type("Model", (dict,), {})()
    worker = module.EngineWorker(
        SimpleNamespace(model_type="m", model_config=model, engine_config=engine_config(mode), **parts)
    )
    monkeypatch.setattr(module.TrainingWorker, "train_batch", lambda self, data: None)

    def refuse(asked: Any, data: Any) -> None:
        assert (asked, data) == (engine, "batch")
        raise RoutingError("no routes")

    monkeypatch.setattr(module, "require_routes", refuse)
    if mode == "disabled":
        assert worker.train_batch("batch") is None
        return
    with pytest.raises(RoutingError, match="no routes"):
        worker.train_batch("batch")


@pytest.mark.parametrize("replayed", [True, False])
def test_a_pool_for_log_probs_records_what_the_update_replays(load: Load, replayed: bool) -> None:
    from omegaconf import OmegaConf
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    replay = {"router_replay": {"mode": "R2" if replayed else "disabled"}}
    config = OmegaConf.create({"actor": {"strategy": "megatron", "megatron": replay}, "ref": {}})
    worker = load(f"{WORKERS}.log_prob_group").LogProbWorker(config, "ref")
    asked: list[Any] = []
    worker.ref = SimpleNamespace(infer_batch=lambda data: asked.append(data))
    worker.compute_log_prob(TensorDict({"input_ids": torch.zeros(2, 3)}, batch_size=2))
    assert tu.get_non_tensor_data(asked[0], key="enable_routing_replay", default=False) is replayed
