# SPDX-License-Identifier: Apache-2.0
"""How evenly the tokens of an update are spread over the experts."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from recipe.async_pipeline.errors import RoutingError
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


class TopKRouter(nn.Module):
    """Returns what megatron-core's router does: probabilities, and which token goes to which expert."""

    num_experts = 4

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number

    def forward(self, routing_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return routing_map.float(), routing_map


def test_the_experts_of_transformers_are_counted_as_its_router_chooses_them(module: ModuleType) -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    load = module.ExpertLoad([model])
    tokens = torch.randint(0, 32, (3, 8))
    logits = model(tokens, output_router_logits=True).router_logits
    chosen = [one.softmax(-1).topk(2).indices for one in logits]
    expected = torch.stack([torch.bincount(one.flatten(), minlength=4) for one in chosen])
    assert expected.sum() == 2 * 3 * 8 * 2
    assert load.take() == module.load_metrics(expected)
    assert load.take() == {}, "what was taken is forgotten"


def test_maps_of_megatrons_router_are_counted_by_the_number_of_the_layer(module: ModuleType) -> None:
    model = nn.ModuleList([TopKRouter(3), TopKRouter(2)])
    load = module.ExpertLoad([model])
    one = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    even = torch.eye(4, dtype=torch.bool)
    model[0](one)
    load.clear()
    model[0](one)
    model[0](one)
    model[1](even)
    assert load.take() == {
        "moe/busiest_expert": pytest.approx((4 + 1) / 2),
        "moe/busiest_expert_worst_layer": pytest.approx(4),
        "moe/unused_experts": pytest.approx(3 / 8),
    }


def count_on_one_stage(rank: int, folder: str) -> None:
    """One rank of a pipeline; the first stage has the second layer, the last one has no experts."""
    from recipe.async_pipeline.verl_bridge.workers.expert_load import ExpertLoad

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    modules = [TopKRouter(2)] if rank == 0 else [nn.Linear(2, 2)]
    load = ExpertLoad(modules)
    if rank == 0:
        modules[0](torch.tensor([[1, 1, 0, 0]], dtype=torch.bool))
    Path(folder, str(rank)).write_text(repr(load.take()), encoding="utf-8")
    dist.destroy_process_group()


def test_all_ranks_report_what_all_have_counted(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(count_on_one_stage, (str(tmp_path),), nprocs=2)
    found = {(tmp_path / str(rank)).read_text(encoding="utf-8") for rank in range(2)}
    assert found == {
        repr({"moe/busiest_expert": 2.0, "moe/busiest_expert_worst_layer": 2.0, "moe/unused_experts": 0.5})
    }


def test_a_dense_model_has_no_such_metrics(module: ModuleType) -> None:
    load = module.ExpertLoad([nn.Linear(2, 2)])
    assert load.take() == {}


@pytest.mark.parametrize(
    "output", [None, torch.zeros(3, 4), (torch.zeros(3, 4), torch.zeros(3)), (torch.zeros(2, 4),)]
)
def test_other_outputs_are_not_counted(module: ModuleType, output: Any) -> None:
    assert module.tokens_of(output, 4) is None


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
    return load(f"{WORKERS}.expert_load")


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
