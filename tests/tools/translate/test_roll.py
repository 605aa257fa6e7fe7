# SPDX-License-Identifier: Apache-2.0
"""Two published files of ROLL become runs whose checks pass; every key of them has become something."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.tools.cli.translate import overrides_of
from recipe.async_pipeline.tools.translate.composition import composed
from recipe.async_pipeline.tools.translate.roll import TABLE, is_agentic, translate_roll
from recipe.async_pipeline.tools.translate.rules import TranslatedFile
from tests.conftest import Load

HERE = Path(__file__).parent
ROLLOUT, ACTOR, REF = (f"actor_rollout_ref.{name}" for name in ("rollout", "actor", "ref"))
ENVIRONMENTS = {
    "train_env_manager": {
        "group_size": 8,
        "num_env_groups": 128,
        "group_size_redundancy": 2,
        "max_env_num_per_worker": 16,
    },
    "custom_envs": {
        "FrozenLake": {
            "env_type": "frozen_lake",
            "max_steps": 10,
            "max_tokens_per_step": 128,
            "env_config": {"is_slippery": False, "size": 4},
        }
    },
    "env_monitor": {"hung_timeout": 3600},
}


def read(file: Path) -> dict[str, Any]:
    return composed(file).document


def translated(name: str, **more: Any) -> TranslatedFile:
    return translate_roll({**read(HERE / f"{name}.yaml"), **more})


@pytest.mark.parametrize("name", ["roll_agentic", "roll_rlvr"])
def test_every_key_of_a_published_file_has_become_something(name: str) -> None:
    found = translated(name)
    assert found.unknown == []
    assert all(one.outcome.overrides or one.outcome.text for one in found.keys)


def test_the_rlvr_file() -> None:
    found = translated("roll_rlvr")
    assert not is_agentic(read(HERE / "roll_rlvr.yaml"))
    for path, value in {
        "+async_pipeline": True,
        "+async_generation_ratio": 1,
        "data.train_batch_size": 64,
        f"{ROLLOUT}.n": 8,
        # 1 sample x 64 accumulated x 8 data-parallel ranks of 16 devices are 64 groups of 8.
        f"{ACTOR}.ppo_mini_batch_size": 64,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
        "data.max_response_length": 8192,
        "trainer.nnodes": 2,
        f"{ROLLOUT}.n_gpus_per_node": 8,
        f"{ROLLOUT}.name": "sglang",
        f"{ROLLOUT}.dtype": "float16",
        "algorithm.adv_estimator": "reinforce_plus_plus",
    }.items():
        assert found.overrides[path] == value, path
    kinds = {one.key: one.outcome.kind for one in found.keys}
    assert kinds["is_num_return_sequences_expand"] == "nothing to do"
    assert kinds["actor_train.strategy_args.strategy_config.tensor_model_parallel_size"] == "set"
    assert kinds["actor_train.data_args.file_name"] == "by hand"
    assert len(found.missing) == 1 and "data.train_files" in found.missing[0]


def test_the_agentic_file_with_and_without_its_environments() -> None:
    alone = translated("roll_agentic")
    assert alone.overrides["data.train_batch_size"] == 1024
    assert any("agentic.environment" in line for line in alone.missing)

    whole = translated("roll_agentic", **ENVIRONMENTS)
    assert whole.unknown == [] and not any("agentic.environment" in line for line in whole.missing)
    agentic = f"+{OWN}.agentic"
    for path, value in {
        "data.train_batch_size": 128,
        f"{ROLLOUT}.n": 8,
        f"{ACTOR}.ppo_mini_batch_size": 128,
        f"{agentic}.environment": "frozen_lake",
        f"{agentic}.environment_kwargs.slippery": False,
        f"{agentic}.max_turns": 10,
        f"{agentic}.max_turn_tokens": 128,
        f"{agentic}.redundancy": 2,
        f"{agentic}.concurrency": 16,
        f"{agentic}.episode_timeout_s": 3600.0,
    }.items():
        assert whole.overrides[path] == value, path


def test_environments_make_a_file_agentic_that_names_its_group_twice() -> None:
    found = translated("roll_agentic", **ENVIRONMENTS, num_return_sequences_in_group=8)
    assert found.overrides["data.train_batch_size"] == 128 and found.overrides[f"{ROLLOUT}.n"] == 8
    kinds = {one.key: one.outcome.kind for one in found.keys}
    assert kinds["actor_infer.generating_args.max_new_tokens"] == "set"


def test_the_limit_of_a_response_is_set_once() -> None:
    key = "actor_infer.generating_args.max_new_tokens"
    alone = translate_roll({"prompt_length": 64, "actor_infer": {"generating_args": {"max_new_tokens": 128}}})
    assert alone.overrides["data.max_response_length"] == 128
    found = translated("roll_rlvr", response_length=4096)
    kinds = {one.key: one.outcome for one in found.keys}
    assert found.overrides["data.max_response_length"] == 4096
    assert kinds[key].kind == "differs" and kinds[key].text.startswith("response_length sets")


def test_engines_have_one_device_unless_the_file_names_more() -> None:
    size = f"{ROLLOUT}.tensor_model_parallel_size"
    assert translated("roll_agentic").overrides[size] == 1
    config = {"strategy_args": {"strategy_config": {"tensor_parallel_size": 4}}}
    assert translated("roll_agentic", actor_infer=config).overrides[size] == 4


CONFIG = "actor_train.strategy_args.strategy_config"


def with_training(name: str, strategy: str, dtype: str = "bf16", **config: Any) -> TranslatedFile:
    """Return the translation of a file with another strategy of training."""
    document: Any = read(HERE / f"{name}.yaml")
    train = document["actor_train"]
    train["strategy_args"] = {"strategy_name": strategy, "strategy_config": config}
    train["model_args"] |= {"dtype": dtype, "disable_gradient_checkpointing": False}
    return translate_roll(document)


def test_megatron_stays_megatron_with_its_sizes() -> None:
    sizes = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 4,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
    }
    switches = {"sequence_parallel": True, "use_distributed_optimizer": False}
    found = with_training(
        "roll_rlvr",
        "megatron_train",
        "fp16",
        **sizes,
        **switches,
        recompute_granularity="full",
        moe_grouped=True,
    )
    megatron = {
        path.removeprefix(f"{ACTOR}.megatron."): value
        for path, value in found.overrides.items()
        if path.startswith(f"{ACTOR}.megatron.")
    }
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert megatron == {
        **sizes,
        **switches,
        "dtype": "float16",
        **{f"override_transformer_config.{name}": value for name, value in recompute.items()},
    }
    assert found.overrides["model_engine"] == "megatron"
    assert not {f"{ACTOR}.strategy", "actor_rollout_ref.model.enable_gradient_checkpointing"} & set(
        found.overrides
    )
    # 64 accumulated x 16 devices / (tensor 2 x pipeline 2) are 32 groups of 8.
    assert found.overrides[f"{ACTOR}.ppo_mini_batch_size"] == 32
    kinds = {one.key: one.outcome.kind for one in found.keys}
    assert kinds[f"{CONFIG}.moe_grouped"] == "by hand" and found.unknown == []
    selective = with_training("roll_rlvr", "megatron_train", recompute_granularity="selective")
    assert [path for path in selective.overrides if "recompute" in path] == [
        f"{ACTOR}.megatron.override_transformer_config.recompute_granularity"
    ]


def test_deepspeed_becomes_fsdp2_without_model_parallelism() -> None:
    found = with_training(
        "roll_rlvr", "deepspeed_train", tensor_model_parallel_size=2, sequence_parallel=True, zero=3
    )
    assert (
        found.overrides[f"{ACTOR}.strategy"] == found.overrides["actor_rollout_ref.ref.strategy"] == "fsdp2"
    )
    assert not [path for path in found.overrides if "megatron" in path or path == "model_engine"]
    assert found.overrides["actor_rollout_ref.model.enable_gradient_checkpointing"] is True
    kinds = {one.key: one.outcome.kind for one in found.keys}
    assert kinds[f"{CONFIG}.tensor_model_parallel_size"] == "differs"
    assert found.unknown == [f"{CONFIG}.zero"]


def test_the_keys_of_deepspeed_have_a_meaning_each() -> None:
    found = with_training(
        "roll_rlvr",
        "deepspeed_train",
        fp16={"enabled": "auto"},
        bf16={"enabled": True},
        zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}},
        zero_allow_untested_optimizer=True,
        train_micro_batch_size_per_gpu="auto",
        gradient_clipping=1.0,
    )
    kinds = {one.key.removeprefix(f"{CONFIG}."): one.outcome.kind for one in found.keys}
    assert found.unknown == []
    assert kinds["zero_optimization.stage"] == kinds["bf16.enabled"] == "nothing to do"
    assert kinds["zero_optimization.offload_param.device"] == kinds["gradient_clipping"] == "by hand"


def test_fsdp2_stays_fsdp2_with_its_settings() -> None:
    settings: dict[str, Any] = {"fsdp_size": 16, "offload_policy": True, "reshard_after_forward": False}
    found = with_training(
        "roll_rlvr",
        "fsdp2_train",
        **settings,
        param_dtype="bf16",
        reduce_dtype="bf16",
        wrap_policy={"wrap_embeddings": True},
        apply_tiled_mlp=True,
    )
    assert found.overrides[f"{ACTOR}.strategy"] == found.overrides[f"{REF}.strategy"] == "fsdp2"
    for name, value in settings.items():
        assert found.overrides[f"{ACTOR}.fsdp_config.{name}"] == value
    kinds = {one.key: one.outcome.kind for one in found.keys}
    assert kinds[f"{CONFIG}.param_dtype"] == "nothing to do"
    assert kinds[f"{CONFIG}.reduce_dtype"] == kinds[f"{CONFIG}.wrap_policy.wrap_embeddings"] == "by hand"
    assert found.unknown == [f"{CONFIG}.apply_tiled_mlp"]
    # DeepSpeed has no such key.
    assert f"{CONFIG}.fsdp_size" in with_training("roll_rlvr", "deepspeed_train", fsdp_size=16).unknown


def test_sizes_of_forward_passes_are_taken_over_or_asked_for() -> None:
    size = "log_prob_micro_batch_size_per_gpu"
    found = translated("roll_rlvr", reference={"infer_batch_size": 4})
    assert (found.overrides[f"{ROLLOUT}.{size}"], found.overrides[f"{REF}.{size}"]) == (2, 4)
    assert not any(size in line for line in found.missing)
    document: Any = read(HERE / "roll_rlvr.yaml") | {"reference": {"device_mapping": "list(range(0,8))"}}
    del document["actor_train"]["infer_batch_size"]
    missing = translate_roll(document).missing
    assert [line.split(":")[0] for line in missing[1:]] == [f"{ROLLOUT}.{size}", f"{REF}.{size}"]


def test_checkpoints_go_to_the_output_folder() -> None:
    found = translated("roll_rlvr", output_dir="./output", logging_dir="./output/logs")
    assert found.overrides["trainer.default_local_dir"] == "./output" and found.unknown == []


def test_another_strategy_of_training_is_by_hand() -> None:
    found = with_training("roll_rlvr", "fsdp_train")
    kinds = {one.key: one.outcome.kind for one in found.keys}
    assert kinds["actor_train.strategy_args.strategy_name"] == "by hand"


def test_a_batch_that_is_no_multiple_of_its_groups_is_named_and_the_rest_is_translated() -> None:
    found = translated("roll_agentic", train_env_manager={"group_size": 7})
    assert "rollout_batch_size" in found.unsupported
    text = next(one.outcome.text for one in found.keys if one.key == "rollout_batch_size")
    assert "must be a multiple of train_env_manager.group_size, 7, got 1024" in text
    assert found.overrides["trainer.total_training_steps"] == 1024


LAKES = {
    "train_env_manager": {"group_size": 8, "tags": ["Lake"]},
    "custom_envs": {
        "Boxes": {"env_type": "sokoban", "max_steps": 10, "max_tokens_per_step": 32},
        "Lake": {"env_type": "frozen_lake", "max_steps": 5, "max_tokens_per_step": 64},
        "Other": {"env_type": "webshop"},
    },
}


def kinds_of(found: TranslatedFile) -> dict[str, str]:
    return {one.key: one.outcome.kind for one in found.keys}


def test_only_the_environment_of_the_training_is_translated() -> None:
    found = translated("roll_agentic", **LAKES)
    agentic = f"+{OWN}.agentic"
    assert found.overrides[f"{agentic}.environment"] == "frozen_lake"
    assert found.overrides[f"{agentic}.max_turns"] == 5
    kinds = kinds_of(found)
    assert kinds["custom_envs.Boxes.env_type"] == kinds["custom_envs.Other.env_type"] == "nothing to do"
    several = {**LAKES, "train_env_manager": {"group_size": 8, "tags": ["Lake", "Boxes"]}}
    kinds = kinds_of(translated("roll_agentic", **several))
    assert (kinds["custom_envs.Boxes.env_type"], kinds["custom_envs.Lake.env_type"]) == ("by hand", "set")


def test_the_smaller_limit_of_a_turn_is_no_conflict() -> None:
    found = translated("roll_agentic", **LAKES)
    # The engine's is 128, the trained environment's 64, another environment's 32.
    assert found.overrides[f"+{OWN}.agentic.max_turn_tokens"] == 64 and found.unsupported == []


def test_the_sequence_wins_over_the_response_as_in_roll() -> None:
    found = translated("roll_rlvr", sequence_length=4096, prompt_length=1024, response_length=512)
    assert found.overrides["data.max_prompt_length"] == 1024
    assert found.overrides["data.max_response_length"] == 3072
    assert found.unsupported == [] and kinds_of(found)["response_length"] == "nothing to do"


def test_a_limit_of_the_engine_wins_over_the_sequence() -> None:
    document: Any = read(HERE / "roll_agentic.yaml")
    document["actor_infer"]["strategy_args"]["strategy_config"]["max_model_len"] = 9000
    found = translate_roll(document)
    assert found.overrides[f"{ROLLOUT}.max_model_len"] == 9000 and found.unsupported == []


def test_devices_that_two_workers_share_are_a_difference() -> None:
    train, infer = "actor_train.device_mapping", "actor_infer.device_mapping"
    document: Any = read(HERE / "roll_agentic.yaml")
    assert kinds_of(translate_roll(document))[infer] == "set"
    document["actor_infer"]["device_mapping"] = "list(range(2,8))"
    found = translate_roll(document)
    assert (kinds_of(found)[train], kinds_of(found)[infer]) == ("differs", "differs")
    assert found.overrides["trainer.n_gpus_per_node"] == 4
    assert found.overrides[f"{ROLLOUT}.n_gpus_per_node"] == 6


def test_a_default_of_roll_gives_way_to_the_file() -> None:
    key = f"{ACTOR}.loss_agg_mode"
    assert translated("roll_rlvr").overrides[key] == "seq-mean-token-mean"
    assert translated("roll_rlvr", loss_agg_mode="token-mean").overrides[key] == "token-mean"


def test_an_unknown_key_is_named() -> None:
    assert translated("roll_rlvr", warp_factor=9).unknown == ["warp_factor"]


def test_no_rule_is_hidden_by_one_before_it() -> None:
    patterns = [pattern for pattern, _ in TABLE]
    assert len(set(patterns)) == len(patterns)
    for place, pattern in enumerate(patterns):
        for before in patterns[:place]:
            assert not fnmatchcase(pattern, before), f"{before} hides {pattern}"


@pytest.mark.real_engine
@pytest.mark.parametrize("name", ["roll_agentic", "roll_rlvr"])
def test_the_run_of_a_published_file_passes_all_checks(name: str, load: Load, tmp_path: Path) -> None:
    """What is by hand: data, and for agents an environment. The engine of one file is not a part of CI."""
    pytest.importorskip("gymnasium")
    explain = load("recipe.async_pipeline.tools.cli.explain")
    found = translated(name, **(ENVIRONMENTS if name == "roll_agentic" else {}))
    by_hand = [
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"data.val_files={tmp_path / 'val.parquet'}",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.calculate_log_probs=true",
        # An episode may take an hour in that file, which is more than a run waits by default.
        f"+{OWN}.faults.wait_timeout_s=10000",
    ]
    config, unknown = explain.composed(None, "ppo_trainer", [*overrides_of(found), *by_hand])
    assert not unknown
    checked = load("recipe.async_pipeline.verl_bridge.rules.config_checks").checked(config, absent=[])
    assert checked.translation.config.staleness.max_lag == 1
    assert checked.translation.config.strategy == "one_step_off"
    actor = config.actor_rollout_ref.actor
    tensor = 1 if name == "roll_agentic" else 2
    assert (actor.strategy, actor.megatron.tensor_model_parallel_size) == ("megatron", tensor)
