# SPDX-License-Identifier: Apache-2.0
"""What Megatron, or Megatron on the CPU, cannot run is one line before the start."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.installed.verl import find_verl_root
from tests import REPOSITORY
from tests.conftest import Load
from tests.verl_bridge.conftest import Smoke

pytestmark = pytest.mark.real_engine
ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
MEGATRON = f"{ACTOR}.megatron"
MODEL = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6}


@pytest.fixture
def megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smoke:
    """Return a factory of changed copies of the smoke config with Megatron, with a model on disk."""
    monkeypatch.setenv("ASYNC_PIPELINE_TASK", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    GlobalHydra.instance().clear()
    search = f"hydra.searchpath=[file://{find_verl_root() / 'verl' / 'trainer' / 'config'}]"

    def make(changes: dict[str, Any] | None = None, *, switched_on: bool = True) -> DictConfig:
        with initialize_config_dir(config_dir=str(REPOSITORY / "configs"), version_base=None):
            config = compose(config_name="smoke_cpu", overrides=[search, "training_engine=megatron"])
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


def test_the_strategy_alone_does_not_select_verls_config(module: ModuleType, smoke: Smoke) -> None:
    with pytest.raises(ConfigError, match="got the one of FSDPActorConfig; set model_engine=megatron"):
        module.check_megatron(smoke({f"{ACTOR}.strategy": "megatron"}), critic=False)


def test_verls_config_alone_does_not_select_the_engine(module: ModuleType, smoke: Smoke) -> None:
    mixed = smoke({f"{ACTOR}._target_": "verl.workers.config.McoreActorConfig"})
    with pytest.raises(ConfigError, match="strategy must be megatron with model_engine=megatron, got fsdp2"):
        module.check_megatron(mixed, critic=False)


def test_missing_packages_are_named(
    module: ModuleType, megatron: Smoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="requires megatron-core and megatron-bridge, got neither; run"):
        module.check_megatron(megatron(), critic=False)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (f"{MEGATRON}.virtual_pipeline_model_parallel_size", 2, "gloo mixes up the messages"),
        (f"{MEGATRON}.context_parallel_size", 2, "does not split a sequence"),
        (f"{MEGATRON}.dynamic_context_parallel", True, "does not split a sequence"),
        (f"{MEGATRON}.use_megatron_fsdp", True, "it requires CUDA"),
        (f"{MEGATRON}.vanilla_mbridge", True, "it requires Transformer Engine"),
        (f"{MEGATRON}.override_transformer_config.fp8", "e4m3", "it requires Transformer Engine"),
        (f"{MEGATRON}.override_transformer_config.fp4", "e2m1", "it requires Transformer Engine"),
        ("actor_rollout_ref.model.use_fused_kernels", True, "kernels require CUDA"),
    ],
)
def test_what_the_cpu_cannot_run_is_refused_there_only(
    module: ModuleType, megatron: Smoke, path: str, value: Any, words: str
) -> None:
    changes = {path: value, "trainer.device": "cpu"}
    with pytest.raises(ConfigError, match=words) as caught:
        module.check_megatron(megatron(changes), critic=False)
    assert str(caught.value).startswith(f"{path} must be ") and f"got {value!r}" in str(caught.value)
    module.check_megatron(megatron({**changes, "trainer.device": "cuda"}), critic=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{MEGATRON}.use_mbridge": False}, "use_mbridge must be True"),
        ({f"{MEGATRON}.qat.enable": True}, "qat.enable must be False"),
        ({f"{MEGATRON}.router_replay.mode": "R2"}, "must be disabled for a model without experts, got 'R2'"),
        (
            {f"{ACTOR}.optim.lr_warmup_steps": 60},
            f"^{ACTOR}.optim.lr_warmup_steps must be < trainer.total_training_steps=60 .*, got 60; lower it$",
        ),
        (
            {f"{ACTOR}.optim.lr_warmup_steps": 5, f"{ACTOR}.optim.lr_decay_steps": 4},
            f"must be < {ACTOR}.optim.lr_decay_steps=4 with Megatron, got 5; lower",
        ),
        (
            {"actor_rollout_ref.model.lora_rank": 8},
            "lora_rank must be 0 with strategy=megatron, which reads .*lora.rank, ",
        ),
        ({f"{MEGATRON}.tensor_model_parallel_size": 0}, "must be >= 1, got 0"),
        ({f"{MEGATRON}.tensor_model_parallel_size": 4}, r"model's 2 query groups \(num_key_value_heads"),
        ({f"{MEGATRON}.tensor_model_parallel_size": 3}, "model's 4 attention heads"),
        ({f"{MEGATRON}.pipeline_model_parallel_size": 4}, "model's 6 layers"),
        ({f"{MEGATRON}.expert_model_parallel_size": 2}, "must be 1 for a model without experts, got 2"),
        (
            {f"{ACTOR}.use_kl_loss": True, f"{REF}.megatron.tensor_model_parallel_size": 2},
            "ref.megatron.tensor_model_parallel_size must equal .*actor.megatron.*=1, got 2",
        ),
        (
            {f"{ACTOR}.use_kl_loss": True, f"{REF}.strategy": "fsdp2"},
            "ref.strategy must equal actor_rollout_ref.actor.strategy=megatron, got fsdp2",
        ),
        (
            {"critic.megatron.pipeline_model_parallel_size": 2},
            "critic.megatron.pipeline_model_parallel_size must equal",
        ),
    ],
)
def test_contradictions_are_refused(
    module: ModuleType, megatron: Smoke, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        module.check_megatron(megatron(changes), critic=True)


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {f"{MEGATRON}.{REPLAY}": "R3"},
            f"{MEGATRON}.{REPLAY} must be disabled or R2, got 'R3'; the eng",
        ),
        (
            {f"{ACTOR}.use_kl_loss": True, f"{REF}.megatron.{REPLAY}": "R2"},
            f"{REF}.megatron.{REPLAY} must be disabled, got 'R2'; only the actor's",
        ),
        ({f"critic.megatron.{REPLAY}": "R2"}, f"critic.megatron.{REPLAY} must be disabled, got 'R2'"),
        (
            {"algorithm.rollout_correction.bypass_mode": True},
            "bypass_mode must be False with .*mode=R2, got True; the routing is recorded while old log-probs",
        ),
        (
            {"actor_rollout_ref.model.use_remove_padding": False},
            "use_remove_padding must be True with .*mode=R2, got False; the routing is recorded for packed",
        ),
        ({f"{MEGATRON}.pad_to_length": True}, "pad_to_length must be False with .*mode=R2, got True"),
    ],
)
def test_routing_is_replayed_for_every_token_or_refused(
    module: ModuleType, experts: Smoke, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        module.check_megatron(experts(R2 | changes), critic=True)


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
