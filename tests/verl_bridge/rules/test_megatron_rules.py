# SPDX-License-Identifier: Apache-2.0
"""What Megatron, or Megatron on the CPU, cannot run is one line before the start."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.async_pipeline.errors import ConfigError
from tests.conftest import Load
from tests.refusals import Refused, cases_of
from tests.verl_bridge.conftest import Smoke, compose_smoke

pytestmark = pytest.mark.real_engine
ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
MEGATRON = f"{ACTOR}.megatron"
MODEL = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6}


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    return compose_smoke("training_engine=megatron")


@pytest.fixture
def megatron(composed: DictConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smoke:
    """Return a factory of changed copies of the smoke config with Megatron, with a model on disk."""
    monkeypatch.setenv("ASYNC_PIPELINE_TASK", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")

    def make(changes: dict[str, Any] | None = None, *, switched_on: bool = True) -> DictConfig:
        config = copy.deepcopy(composed)
        with open_dict(config):
            config.async_pipeline = switched_on
            for path, value in (changes or {}).items():
                OmegaConf.update(config, path, value, force_add=True)
        return config

    return make


def test_the_smoke_config_with_megatron_is_supported(module: ModuleType, megatron: Smoke, load: Load) -> None:
    config = megatron()
    assert config.actor_rollout_ref.actor.strategy == config.critic.strategy == "megatron"
    module.check_megatron(config, critic=True)
    rules = load("recipe.async_pipeline.verl_bridge.rules.config_rules")
    rules.check_verl_config(config)
    rules.check_adapters(config)


def test_fsdp_is_not_looked_at(module: ModuleType, smoke: Smoke) -> None:
    module.check_megatron(smoke(), critic=True)


def test_missing_packages_are_named(
    module: ModuleType, megatron: Smoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="requires megatron-core and megatron-bridge, got neither; run"):
        module.check_megatron(megatron(), critic=False)


@cases_of("megatron")
def test_what_megatron_cannot_run_is_refused(
    module: ModuleType, megatron: Smoke, tmp_path: Path, case: Refused
) -> None:
    changes = dict(case.changes)
    described = json.dumps(MODEL | changes.pop("model", {}))
    (tmp_path / "model" / "config.json").write_text(described, encoding="utf-8")
    of_the_cpu = changes.get("trainer.device") == "cpu"
    case.replay(lambda _: module.check_megatron(megatron(changes), critic=not of_the_cpu))
    if of_the_cpu:
        module.check_megatron(megatron({**changes, "trainer.device": "cuda"}), critic=False)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_divide_over_their_ranks(
    module: ModuleType, megatron: Smoke, tmp_path: Path, name: str
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | {name: 6}), encoding="utf-8")
    module.check_megatron(megatron({f"{MEGATRON}.expert_model_parallel_size": 3}), critic=False)
    with pytest.raises(ConfigError, match="model's 6 experts"):
        module.check_megatron(megatron({f"{MEGATRON}.expert_model_parallel_size": 4}), critic=False)


REPLAY = "router_replay.mode"
R2 = {f"{MEGATRON}.{REPLAY}": "R2", "actor_rollout_ref.model.use_remove_padding": True}


@pytest.fixture
def experts(tmp_path: Path, megatron: Smoke) -> Smoke:
    """Like `megatron`, with a mixture of experts."""
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | {"num_experts": 4}), encoding="utf-8")
    return megatron


def test_the_trainers_routing_may_be_replayed(module: ModuleType, experts: Smoke) -> None:
    module.check_megatron(experts(R2), critic=True)


def test_the_user_may_distribute_the_layers(module: ModuleType, megatron: Smoke) -> None:
    fields = {"num_layers_in_first_pipeline_stage": 3}
    changes = {
        f"{MEGATRON}.pipeline_model_parallel_size": 4,
        f"{MEGATRON}.override_transformer_config": fields,
    }
    module.check_megatron(megatron(changes), critic=False)


@pytest.mark.parametrize(
    ("described", "changes"),
    [
        ({"num_local_experts": 4, "model_type": "gpt_oss"}, {}),
        ({"num_experts": 4}, {f"{MEGATRON}.override_transformer_config": {"add_bias_linear": True}}),
    ],
)
def test_experts_with_a_bias_are_refused_on_the_cpu_only(
    module: ModuleType, megatron: Smoke, tmp_path: Path, described: dict[str, Any], changes: dict[str, Any]
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | described), encoding="utf-8")
    with pytest.raises(ConfigError, match="model.path must be a model whose experts have no bias"):
        module.check_megatron(megatron({**changes, "trainer.device": "cpu"}), critic=False)
    module.check_megatron(megatron({**changes, "trainer.device": "cuda"}), critic=False)


def test_a_dense_model_may_have_biases_on_the_cpu(module: ModuleType, megatron: Smoke) -> None:
    changes = {f"{MEGATRON}.override_transformer_config": {"add_bias_linear": True}}
    module.check_megatron(megatron({**changes, "trainer.device": "cpu"}), critic=False)


@pytest.mark.parametrize(
    ("device", "kind", "why"),
    [
        ("cpu", "qwen3_vl", "a model of text with Megatron on the CPU platform"),
        (
            "cuda",
            "qwen2_5_vl",
            "another model than Qwen2.5-VL, whose sizes Megatron-Bridge 0.3.1 does not find",
        ),
        ("cuda", "qwen3_vl", None),
    ],
)
def test_models_of_pictures_that_the_bridge_cannot_make_are_refused(
    module: ModuleType,
    megatron: Smoke,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    kind: str,
    why: str | None,
) -> None:
    described = {"model_type": kind, "vision_config": {}, "text_config": MODEL}
    (tmp_path / "model" / "config.json").write_text(json.dumps(described), encoding="utf-8")
    releases = {"megatron-bridge": "0.3.1", "transformers": "5.10.4"}
    monkeypatch.setattr(module, "version", releases.__getitem__)
    with pytest.raises(ConfigError, match=f"model.path must be {why}") if why else nullcontext():
        module.check_megatron(megatron({"trainer.device": device}), critic=False)
