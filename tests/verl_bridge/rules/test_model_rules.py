# SPDX-License-Identifier: Apache-2.0
"""A model, or an option of the engine, that would serve other weights than the published ones is refused
before Ray starts.
"""

from __future__ import annotations

import json
import warnings
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recipe.async_pipeline.cli.main import main
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.bench.weight_sync_jobs import TIMED
from tests import REPOSITORY
from tests.conftest import Load
from tests.refusals import Refused, cases_of
from tests.verl_bridge.conftest import Smoke

pytestmark = pytest.mark.real_engine

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
ARGUMENTS = f"{ROLLOUT}.engine_kwargs.vllm"

DENSE = {"model_type": "qwen2", "hidden_size": 128, "num_attention_heads": 2}
EXPERTS = DENSE | {"num_experts": 4, "moe_intermediate_size": 64}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def write_model(folder: Path, described: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")


@cases_of("model")
def test_a_model_that_the_engine_cannot_serve_is_refused(
    launch: ModuleType, smoke: Smoke, tmp_path: Path, case: Refused
) -> None:
    changes = dict(case.changes)
    write_model(tmp_path / "task" / "model", changes.pop("model"))
    case.replay(lambda _: launch.checked(smoke(changes)))


@pytest.mark.parametrize(
    "described",
    [
        DENSE,
        DENSE | {"head_dim": 64, "num_attention_heads": 8},
        DENSE | {"kv_lora_rank": 512},
        EXPERTS,
        {"text_config": DENSE},
        {"model_type": "mamba"},
        DENSE | {"model_type": "nemotron_h", "hybrid_override_pattern": "M-*", "n_routed_experts": 8},
    ],
)
def test_a_model_that_the_engine_can_serve_is_accepted(
    launch: ModuleType, smoke: Smoke, tmp_path: Path, described: Any
) -> None:
    write_model(tmp_path / "task" / "model", described)
    launch.checked(smoke())


def test_a_model_with_pictures_is_accepted_where_they_can_be_read(
    module: ModuleType, launch: ModuleType, smoke: Smoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "task" / "model", {"vision_config": {"depth": 2}, "text_config": DENSE})
    launch.checked(smoke())
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    part = "where torchvision cannot be imported, got .*; install the torchvision that matches your"
    with pytest.raises(ConfigError, match=part):
        launch.checked(smoke())


def test_experts_are_divided_by_tensor_parallelism(module: ModuleType, smoke: Smoke, tmp_path: Path) -> None:
    write_model(tmp_path / "task" / "model", EXPERTS | {"moe_intermediate_size": 96})
    module.check_model(smoke())
    module.check_model(smoke({f"{ROLLOUT}.tensor_model_parallel_size": 2, "trainer.device": "cuda"}))


def test_the_devices_of_a_replica_share_the_heads(module: ModuleType, smoke: Smoke, tmp_path: Path) -> None:
    write_model(
        tmp_path / "task" / "model", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    )
    for fits in (1, 2, 4):
        module.check_model(smoke({f"{ROLLOUT}.tensor_model_parallel_size": fits, "trainer.device": "cuda"}))


def test_fp8_and_expert_parallelism_need_an_accelerator(module: ModuleType, smoke: Smoke) -> None:
    elsewhere = {"trainer.device": "cuda"}
    module.check_model(smoke(elsewhere | {f"{ROLLOUT}.quantization": "fp8"}))
    module.check_model(smoke(elsewhere | {f"{ROLLOUT}.expert_parallel_size": 2}))
    adapters = {f"{ROLLOUT}.quantization": "fp8", f"{MODEL}.lora_rank": 8}
    with pytest.raises(ConfigError, match="quantization must be null for LoRA adapters that are not merged"):
        module.check_model(smoke(elsewhere | adapters))
    module.check_model(smoke(elsewhere | adapters | {f"{MODEL}.lora.merge": True}))


def test_fp8_is_refused_for_latent_attention(module: ModuleType, smoke: Smoke, tmp_path: Path) -> None:
    """vLLM's `W_UV` and `W_UK_T` are computed from quantized weights, when it starts."""
    latent = {"trainer.device": "cuda", f"{MODEL}.hf_config_path": str(tmp_path / "latent")}
    write_model(tmp_path / "latent", DENSE | {"model_type": "deepseek_v2", "kv_lora_rank": 512})
    module.check_model(smoke(latent))
    part = rf"{ROLLOUT}.quantization must be null for .* \(kv_lora_rank .*\), got 'fp8', .*; leave it out"
    with pytest.raises(ConfigError, match=part):
        module.check_model(smoke(latent | {f"{ROLLOUT}.quantization": "fp8"}))


def test_a_description_that_cannot_be_read_is_refused(
    module: ModuleType, smoke: Smoke, tmp_path: Path
) -> None:
    write_model(tmp_path / "other", {})
    (tmp_path / "other" / "config.json").write_text("{", encoding="utf-8")
    path = f"{MODEL}.hf_config_path"
    with pytest.raises(ConfigError, match=r"path must name a model, got .*other', .*correct it$"):
        module.check_model(smoke({path: str(tmp_path / "other")}))


@pytest.mark.parametrize("path", ["Qwen/Qwen3-0.6B", "hdfs://host/model/deep/below", "a name with spaces"])
def test_a_model_that_is_not_here_yet_is_accepted(module: ModuleType, smoke: Smoke, path: str) -> None:
    module.check_model(smoke({f"{MODEL}.path": path}))


def test_options_that_leave_the_weights_alone_are_accepted(launch: ModuleType, smoke: Smoke) -> None:
    launch.checked(
        smoke(
            {
                f"{ARGUMENTS}.speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
                f"{ARGUMENTS}.hf_overrides": {"max_position_embeddings": 64},
                f"{ARGUMENTS}.enable_eplb": False,
                f"{ARGUMENTS}.quantization": None,
                f"{ARGUMENTS}.worker_extension_cls": TIMED,
                f"{ARGUMENTS}.seed": 1,
            }
        )
    )


def test_explain_refuses_what_a_run_would(
    launch: ModuleType, smoke: Smoke, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["explain", "--config-path", str(REPOSITORY / "configs"), "--config-name", "smoke_cpu"]
    assert main([*asked, f"{ROLLOUT}.quantization=torchao"]) == 2
    assert f"{ROLLOUT}.quantization must be null or fp8, got 'torchao'" in capsys.readouterr().err
    assert main([*asked, f"{ROLLOUT}.quantization=fp8"]) == 2
    assert f"{ROLLOUT}.quantization must be null on the CPU platform, got 'fp8'" in capsys.readouterr().err
    assert main([*asked, f"{ROLLOUT}.expert_parallel_size=2"]) == 2
    assert f"{ROLLOUT}.expert_parallel_size must be 1 or" in capsys.readouterr().err
    sizes = [f"{ROLLOUT}.{kind}_parallel_size=2" for kind in ("expert", "tensor_model")]
    assert main([*asked, *sizes]) == 2
    assert f"{ROLLOUT}.expert_parallel_size must be 1 on the CPU platform, got 2" in capsys.readouterr().err
    assert main(asked) == 0
    write_model(tmp_path / "task" / "model", DENSE | {"quantization_config": FP8})
    assert main(asked) == 2
    assert "must name an unquantized model" in capsys.readouterr().err


def test_the_engines_own_limits_are_known(module: ModuleType, load: Load) -> None:
    attention = load("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    assert list(module.CPU_HEAD_SIZES) == attention.get_supported_head_sizes()
    experts = load("vllm.model_executor.layers.fused_moe.experts.cpu_moe").CPUUnquantizedExperts
    assert experts._intermediate_alignment() == module.CPU_EXPERT_ALIGNMENT

    arguments = load("vllm.engine.arg_utils").EngineArgs.__dataclass_fields__
    own = {"speculative_config", "hf_overrides", *module.REPLACED_ARGUMENTS}
    assert own <= arguments.keys()


@pytest.mark.parametrize("estimator", ["gae", "grpo", "unheard"])
def test_the_models_of_a_run_are_the_ones_that_verl_makes(
    module: ModuleType, load: Load, smoke: Smoke, estimator: str
) -> None:
    verls = load("verl.trainer.ppo.utils")
    kl_in_reward, kl_loss = "algorithm.use_kl_in_reward", "actor_rollout_ref.actor.use_kl_loss"
    for first, second in product((True, False), repeat=2):
        config = smoke({kl_in_reward: first, kl_loss: second})
        assert module.has_reference(config) is bool(verls.need_reference_policy(config))
    for enable in (True, False, None):
        config = smoke({"critic.enable": enable, "algorithm.adv_estimator": estimator})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert module.has_critic(config) is verls.need_critic(config)
