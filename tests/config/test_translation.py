# SPDX-License-Identifier: Apache-2.0
"""Each key of this package and of other systems is translated, or refused on one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.agents.episodes import POLICIES as END_POLICIES
from recipe.async_pipeline.agents.episodes import EndPolicies
from recipe.async_pipeline.config.aliases import FOREIGN
from recipe.async_pipeline.config.loss_modes import LOSS_OF_VARIANT
from recipe.async_pipeline.config.misplaced import SWITCHES
from recipe.async_pipeline.config.paths import MODE, OWN, PATCH_FREE, select
from recipe.async_pipeline.config.schema import (
    AsyncPipelineConfig,
    canonical_strategy,
    knob_paths,
)
from recipe.async_pipeline.config.translation import Translation, is_enabled, resolve
from recipe.async_pipeline.core.bad_data import POLICIES, Policies
from recipe.async_pipeline.errors import ConfigError
from tests.fakes.alias_values import LOSS, ROLLOUT, UNDERSTOOD, assert_one_line, nested, own

BATCH, MINI_BATCH = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"

REFUSED: list[tuple[str, Any, str]] = [
    ("async_strategy", "two_steps", "must be one of"),
    ("actor_rollout_ref.async_strategy", "", "must be one of"),
    ("trainer.generate_ahead_steps", 0, "1 is on-policy, 2 is one-step-off"),
    ("trainer.generate_ahead_steps", True, "whole number"),
    ("async_generation_ratio", -1, ">= 0"),
    ("async_generation_ratio", float("inf"), "a number >= 0"),
    ("async_generation_ratio", float("nan"), "a number >= 0"),
    ("staleness_threshold", -0.1, "a number >= 0"),
    ("trigger_parameter_sync_step", 0, "a whole number >= 1"),
    ("trigger_parameter_sync_step", 1.5, "a whole number >= 1"),
    ("partial_rollout", "yes", "True or False"),
    ("require_batches", 0, "a whole number >= 1"),
    ("async_training.require_batches", True, "a whole number >= 1"),
    (f"{ROLLOUT}.enable_dual_buffer", False, "leave it out"),
    (f"{ROLLOUT}.with_reward", 1, "must be True or False"),
    (f"{ROLLOUT}.param_update_preduce_bucket_size_mb", 0, "leave it out"),
    (f"{ROLLOUT}.param_update_consume_bucket_size_mb", "32", "leave it out"),
    ("pg_variant", "tiss", "did you mean 'tis'"),
    ("pg_variant", {"a": 1}, "must be one of vanilla, ppo"),
    ("actor_rollout_ref.actor.pg_variant", "gspo", "must be one of vanilla, ppo"),
    ("trainer.use_nodes_ratios", [1, 1], "must be [train, logp, ref_logp, generate]"),
    ("trainer.sperated_node_tasks", "train", "must be a list of stages"),
    ("trainer.sperated_node_ratios", [1], "without it; add it"),
    (f"{ROLLOUT}.sde_type", "dpm", "must be one of"),
    (f"{ROLLOUT}.sde_window_range", [5], "must be [first, end], two whole numbers"),
    (f"{ROLLOUT}.algo.sde_window_range", [0, 2.5], "must be [first, end], two whole numbers"),
    (f"{ROLLOUT}.guidance_scale", 4.5, "guidance by a second forward is not supported"),
    (f"{ROLLOUT}.pipeline.guidance_scale", 4.5, "guidance by a second forward is not supported"),
    (f"{ROLLOUT}.pipeline.true_cfg_scale", 4.0, "guidance by a second forward is not supported"),
    (f"{ROLLOUT}.val_kwargs.algo.noise_level", 0.7, "without noise"),
    ("actor_rollout_ref.actor.diffusion_loss.loss_mode", "nft", "set actor_rollout_ref.actor.policy_loss"),
    ("actor_rollout_ref.actor.diffusion_loss.clip_ratio", 0, "must be a number between 0 and 1"),
    ("actor_rollout_ref.actor.n_gpus_per_node", True, "must be a whole number >= 1"),
    ("data.reward_fn", ["paddle-ocr"], "set reward.custom_reward_function.path"),
    ("data.data_source", "ocr", "as the column data_source"),
]


# The switch.


@pytest.mark.parametrize("values", [{}, {"async_pipeline": True}])
def test_the_mode_of_an_unpatched_verl_is_a_switch(values: dict[str, Any]) -> None:
    assert is_enabled(nested((MODE, PATCH_FREE), *values.items()))
    assert not is_enabled(nested((MODE, "sync")))


@pytest.mark.parametrize("switch", SWITCHES)
def test_the_mode_and_a_switch_must_agree(switch: str) -> None:
    with pytest.raises(ConfigError, match=rf"{switch}=False and {MODE}=async_pipeline disagree; keep one"):
        is_enabled(nested((MODE, PATCH_FREE), (switch, False)))


# Translation.


def test_an_empty_config_means_the_defaults() -> None:
    assert resolve({}) == Translation(AsyncPipelineConfig(), ())


@pytest.mark.parametrize(("path", "value", "meaning"), UNDERSTOOD)
def test_a_key_of_another_system_is_translated_and_noted(
    path: str, value: Any, meaning: dict[str, Any]
) -> None:
    translation = resolve(nested((path, value)))
    assert translation.config == AsyncPipelineConfig.of(meaning)
    assert [note.startswith(f"{path}={value} -> ") for note in translation.notes][:1] == [True]


@pytest.mark.parametrize(("path", "value", "reason"), REFUSED)
def test_a_wrong_value_of_a_foreign_key_is_refused(path: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(nested((path, value)))
    assert_one_line(caught, path, repr(value), reason)


def test_groups_of_stages_and_their_shares_are_combined() -> None:
    tasks, ratios = [["logp", "actor-train"], "ref_logp", "generate"], [0.5, 0.25, 0.25]
    found = resolve(nested(("trainer.sperated_node_tasks", tasks), ("trainer.sperated_node_ratios", ratios)))
    assert found.config.pools == {
        "train": {"roles": ["train", "logp"], "share": 0.5},
        "ref_logp": {"roles": ["ref_logp"], "share": 0.25},
        "generate": {"roles": ["generate"], "share": 0.25},
    }
    assert found.notes[-1].endswith("-> pools train+logp 0.5, ref_logp 0.25, generate 0.25")


def test_layouts_that_disagree_are_refused() -> None:
    pools = {"a": {"roles": ["train"], "devices": 1}, "b": {"roles": ["generate"], "devices": 1}}
    with pytest.raises(ConfigError, match="keep one of them"):
        resolve(nested(("trainer.use_nodes_ratios", [0.5] * 4), (f"{OWN}.pools", pools)))


def test_pools_are_checked() -> None:
    with pytest.raises(ConfigError, match="pools.a.roles must be of train"):
        resolve(own({"pools": {"a": {"roles": ["reward"], "devices": 1}}}))


def test_old_log_probs_of_the_rollout_are_verls_bypass() -> None:
    path = "algorithm.rollout_correction.bypass_mode"
    assert resolve(own({"training.old_logp": "rollout"})).verl == {path: True}
    raw = nested((f"{OWN}.training.old_logp", "trainer"), (path, True))
    with pytest.raises(ConfigError, match="keep one of them"):
        resolve(raw)


def test_every_foreign_key_has_a_test() -> None:
    known = {key.path for key in FOREIGN}
    assert known == {path for path, *_ in UNDERSTOOD} | {path for path, *_ in REFUSED}


def test_a_foreign_key_that_is_null_has_no_effect() -> None:
    paths = [key.path for key in FOREIGN]
    assert resolve(nested(*((path, None) for path in paths))) == resolve({})


@pytest.mark.parametrize("value", ["one_step_off", "one-step-off", "One-Step-Off", "ONE_STEP-OFF"])
def test_spellings_of_a_strategy(value: str) -> None:
    assert canonical_strategy(value, "p") == "one_step_off"


def test_naive_is_on_policy() -> None:
    assert resolve(nested(("async_strategy", "naive"))).config.staleness.max_lag == 0


def test_a_custom_strategy_is_kept() -> None:
    config = resolve(own({"strategy": "my-pkg.mod:Class", "staleness.max_lag": 2})).config
    assert (config.strategy, config.staleness.max_lag) == ("my-pkg.mod:Class", 2)


@pytest.mark.parametrize(("lag", "strategy"), [(0, "on_policy"), (1, "one_step_off"), (2, "n_step_ahead")])
def test_a_lag_alone_selects_the_strategy(lag: int, strategy: str) -> None:
    assert resolve(own({"staleness.max_lag": lag})).config.strategy == strategy


def test_every_knob_is_read() -> None:
    knobs: Mapping[str, Any] = {
        "strategy": "n_step_ahead",
        "staleness.max_lag": 4,
        "faults.wait_timeout_s": 5,
        "weight_sync.timeout_s": 2.5,
        "faults.checkpoint_stall_s": 900.0,
        "faults.checkpoint_attempts": 4,
        "faults.verify_checkpoint_at_start": True,
        "faults.notice_s": 90.0,
        "weight_sync.verify_tensors": 3,
        "fleet.max_replicas": 5,
        "staleness.depth": 2,
        "staleness.oldest_share": 0.5,
        "staleness.straggler": "drop",
        "weight_sync.every": 2,
        "weight_sync.in_flight_policy": "drain",
        "weight_sync.load_staging": "device",
        "weight_sync.reuse_prefixes": True,
        "weight_sync.max_concurrent_loads": 2,
        "weight_sync.gather_bucket_size_mb": 4,
        "weight_sync.load_bucket_size_mb": 2,
        "weight_sync.delta": True,
        "pools": {"a": {"roles": ["train"], "share": 0.5}, "b": {"roles": ["generate"], "share": 0.5}},
        "training.old_logp": "trainer",
        "training.ref_refresh_every": 4,
        "rollout.max_open_requests": 64,
        "validation": "pause",
        "reward.while_generating": False,
        "reward.timeout_s": 2.5,
        "reward.attempts": 3,
        "reward.concurrency": 4,
        "reward.batch": 16,
        "reward.memory_mb": 512,
        "reward.failure": "drop",
        "reward.default": -1.0,
        "agentic.environment": "m:C",
        "agentic.environment_kwargs": {"size": 5},
        "agentic.agent": "external",
        "agentic.agent_env": {"A": "b"},
        "agentic.verify": "judge",
        "agentic.gateway.host": "0.0.0.0",
        "agentic.gateway.max_chains": 1,
        "agentic.gateway.main_model": "policy",
        "agentic.gateway.auxiliary": "drop",
        "agentic.max_turns": 3,
        "agentic.max_turn_tokens": 7,
        "agentic.isolation": "thread",
        "agentic.sandbox": "off",
        "agentic.sandbox_hidden": ["data"],
        "agentic.concurrency": 5,
        "agentic.env_timeout_s": 7,
        "agentic.turn_rewards": True,
        "agentic.failure_reward": -2.0,
        "agentic.attempts": 3,
        "agentic.episode_timeout_s": 1.5,
        "agentic.tool_timeout_s": 0.5,
        "agentic.redundancy": 2,
        "agentic.gateway.runners_dir": "agents",
        "agentic.gateway.agent_may_reward": True,
        "agentic.gateway.lease_s": 8.5,
        "agentic.gateway.unix_dir": "sockets",
        "diffusion.num_inference_steps": 12,
        "diffusion.validation_steps": 20,
        "diffusion.height": 32,
        "diffusion.width": 64,
        "diffusion.sde_type": "cps",
        "diffusion.noise_level": 0.8,
        "diffusion.sde_window_size": 3,
        "diffusion.sde_window_first": 1,
        "diffusion.sde_window_end": 6,
        "diffusion.max_sequence_length": 77,
        "diffusion.kept_pictures": 2,
        "agentic.ends": {"deadline": "drop"},
        "faults.bad_data": {"all_masked": "keep"},
        "faults.max_prompt_attempts": 3,
        "faults.strict_observers": True,
        "run_dir": "somewhere",
        "engine_check": "warn",
        "custom_stages": ["m:C@reward->train"],
    }
    kinds = {f"faults.bad_data.{kind}" for kind in POLICIES} | {f"agentic.ends.{end}" for end in END_POLICIES}
    assert {*knobs} - {"faults.bad_data", "agentic.ends"} | kinds == set(knob_paths())
    # Of an environment and an agent, the user chooses the default.
    chosen = {"actor_rollout_ref": {"rollout": {"agent": {"default_agent_loop": "environment"}}}}
    found = resolve(own(knobs) | chosen).config
    assert found == AsyncPipelineConfig.of(knobs)
    assert found.faults.bad_data == Policies(all_masked="keep")
    assert found.agentic.ends == EndPolicies(deadline="drop")
    for path, value in knobs.items():
        node: Any = found
        for part in path.split("."):
            node = getattr(node, part)
        if path not in ("faults.bad_data", "agentic.ends"):
            assert node == (tuple(value) if isinstance(value, list) else value), path


# Contradictions.


@pytest.mark.parametrize(
    "pairs",
    [
        (("async_strategy", "naive"), ("actor_rollout_ref.async_strategy", "one-step-off")),
        ((f"{OWN}.strategy", "on_policy"), ("async_strategy", "one_step_off")),
        (("trainer.generate_ahead_steps", 2), ("async_generation_ratio", 2)),
        ((f"{OWN}.staleness.max_lag", 3), ("trainer.generate_ahead_steps", 2)),
        ((f"{OWN}.staleness.max_lag", 3), ("staleness_threshold", 1)),
        ((f"{OWN}.weight_sync.every", 2), ("trigger_parameter_sync_step", 4)),
        ((f"{OWN}.weight_sync.in_flight_policy", "abort"), ("partial_rollout", True)),
        (("async_strategy", "n_step_ahead"), ("staleness_threshold", 1)),
        (("pg_variant", "tis"), ("actor_rollout_ref.actor.policy_loss.loss_mode", "gspo")),
        (("async_strategy", "one_step_off"), ("trainer.generate_ahead_steps", 1)),
        ((f"{OWN}.strategy", "on_policy"), (f"{OWN}.staleness.max_lag", 2)),
    ],
)
def test_keys_that_disagree_are_both_named(pairs: tuple[tuple[str, Any], ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(nested(*pairs))
    assert_one_line(caught, *(path for path, _ in pairs))


def test_keys_that_agree_are_accepted() -> None:
    raw = nested(
        ("async_strategy", "one-step-off"),
        ("actor_rollout_ref.async_strategy", "one_step_off"),
        ("trainer.generate_ahead_steps", 2),
        ("async_generation_ratio", 1),
        (f"{OWN}.staleness.max_lag", 1),
    )
    translation = resolve(raw)
    assert translation.config == AsyncPipelineConfig()
    assert len(translation.notes) == 4, "one line for each key of another system"


@pytest.mark.parametrize("variant", LOSS_OF_VARIANT)
@pytest.mark.parametrize("path", ["pg_variant", "actor_rollout_ref.actor.pg_variant"])
def test_a_loss_by_its_name_in_roll(path: str, variant: str) -> None:
    translation = resolve(nested((path, variant), (f"{LOSS}.loss_mode", "vanilla")))
    assert translation.verl[f"{LOSS}.loss_mode"] == LOSS_OF_VARIANT[variant]
    assert translation.verl.get(f"{LOSS}.dro_beta") == (0.1 if variant == "kimi15" else None)


@pytest.mark.parametrize("own", [0.5, 0])
def test_the_users_regularization_strength_is_kept(own: float) -> None:
    translation = resolve(nested(("pg_variant", "kimi15"), (f"{LOSS}.dro_beta", own)))
    assert translation.verl == {f"{LOSS}.loss_mode": "dro"}


def test_a_quota_of_groups_is_a_lag_and_a_share() -> None:
    """verl: (1 + 0.25) x 2 batches in flight or waiting, weights every second step."""
    raw = nested(("staleness_threshold", 0.25), ("trigger_parameter_sync_step", 2), ("partial_rollout", True))
    translation = resolve(raw)
    assert translation.config == AsyncPipelineConfig.of(
        {
            "strategy": "fully_async",
            "staleness.max_lag": 2,
            "staleness.oldest_share": 0.5,
            "weight_sync.every": 2,
        }
    )
    assert translation.notes[-1].startswith(
        "staleness_threshold and trigger_parameter_sync_step: 2.5 batches in flight or waiting -> "
    )


def test_a_batch_may_be_given_in_mini_batches() -> None:
    raw = nested(("require_batches", 4), (MINI_BATCH, 32), (BATCH, 1024))
    assert resolve(raw).verl == {BATCH: 128}


def test_a_lag_may_be_set_with_the_steps_per_weight_update() -> None:
    raw = nested(("trigger_parameter_sync_step", 2), (f"{OWN}.staleness.max_lag", 4))
    assert resolve(raw).config == AsyncPipelineConfig.of(
        {"strategy": "fully_async", "staleness.max_lag": 4, "weight_sync.every": 2}
    )


@pytest.mark.parametrize(
    ("knobs", "rule"),
    [
        (
            {"strategy": "n_step_ahead", "staleness.max_lag": 2, "weight_sync.every": 4},
            "weight_sync.every must be at most 3",
        ),
        (
            {
                "strategy": "n_step_ahead",
                "staleness.max_lag": 2,
                "weight_sync.every": 3,
                "staleness.oldest_share": 0.5,
            },
            "weight_sync.every must be at most 2",
        ),
        ({"strategy": "on_policy", "staleness.oldest_share": 0.5}, "oldest_share must be 1 with max_lag 0"),
        (
            {"strategy": "fully_async", "staleness.oldest_share": 0.5, "staleness.straggler": "mask"},
            "oldest_share must be 1 with straggler mask",
        ),
        ({"staleness.oldest_share": 0.0}, "oldest_share must be above 0"),
        ({"staleness.oldest_share": 1.5}, "oldest_share must be above 0"),
        ({"staleness.depth": 2}, "depth must be from 0 to max_lag, 1"),
        ({"staleness.depth": -1}, "depth must be from 0 to max_lag, 1"),
        (
            {"strategy": "n_step_ahead", "staleness.depth": 1, "weight_sync.every": 3},
            "weight_sync.every must be at most 2",
        ),
        ({"staleness.straggler": "retry"}, "straggler must be one of wait, regenerate, drop"),
        ({"engine_check": None}, "engine_check must be one of refuse, warn, got null; refuse is the default"),
    ],
)
def test_invalid_staleness_knobs_are_refused(knobs: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(own(knobs))
    assert_one_line(caught, rule)


# The switch.


@pytest.mark.parametrize(
    ("raw", "enabled"),
    [
        ({}, False),
        ({"async_pipeline": True}, True),
        ({"async_pipeline": False}, False),
        ({"actor_rollout_ref": {"async_pipeline": True}}, True),
        ({"async_pipeline": True, "actor_rollout_ref": {"async_pipeline": True}}, True),
    ],
)
def test_switch(raw: dict[str, Any], enabled: bool) -> None:
    assert is_enabled(raw) is enabled


@pytest.mark.parametrize("value", ["True", 1, {"staleness.max_lag": 1}])
def test_a_switch_must_be_a_boolean(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        is_enabled({"async_pipeline": value})
    assert_one_line(caught, "async_pipeline", repr(value), OWN)


def test_switches_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match="disagree; keep one"):
        is_enabled({"async_pipeline": True, "actor_rollout_ref": {"async_pipeline": False}})


# Wrong values.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("staleness.max_lag", -1),
        ("staleness.max_lag", 1.5),
        ("staleness.max_lag", True),
        ("staleness.max_lag", "1"),
        ("faults.wait_timeout_s", 0),
        ("faults.wait_timeout_s", "long"),
        ("faults.max_prompt_attempts", 0),
        ("faults.bad_data", "drop"),
        ("faults.bad_data", {"nan": "drop"}),
        ("faults.bad_data", {"no_score": "drop"}),
        ("faults.bad_data", {"nonfinite_logprobs": "keep"}),
        ("faults.bad_data", {"empty_answer": ["drop"]}),
        ("faults.notice_s", True),
        ("agentic.attempts", 0),
        ("agentic.max_turns", 3),
        ("agentic.isolation", "vm"),
        ("agentic.failure_reward", float("nan")),
        ("agentic.ends", {"agent_failed": "train"}),
        ("agentic.episode_timeout_s", 0),
        ("agentic.episode_timeout_s", 900),
        ("faults.wait_timeout_s", float("nan")),
        ("weight_sync.timeout_s", True),
        ("weight_sync.in_flight_policy", "wait"),
        ("weight_sync.in_flight_policy", 3),
        ("weight_sync.load_staging", "gpu"),
        ("weight_sync.reuse_prefixes", "yes"),
        ("weight_sync.reuse_prefixes", 1),
        ("weight_sync.reuse_prefixes", "True"),
        ("weight_sync.max_concurrent_loads", 0),
        ("weight_sync.max_concurrent_loads", "all"),
        ("weight_sync.verify_tensors", 0),
        ("weight_sync.verify_tensors", 1.0),
        ("weight_sync.gather_bucket_size_mb", -5),
        ("weight_sync.load_bucket_size_mb", [1]),
        ("run_dir", 3),
        ("custom_stages", 3),
        ("custom_stages", "m:C@a->b"),
        ("custom_stages", [3]),
        ("custom_stages", ["m:C@a"]),
        ("custom_stages", ["C@a->b"]),
        ("strategy", "onpolicy"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(own({name: value}))
    inner = isinstance(value, dict) or value in (["m:C@a"], ["C@a->b"])
    shown = repr(next(iter(value.values() if isinstance(value, dict) else value))) if inner else repr(value)
    assert_one_line(
        caught, f"{OWN}.{name}", shown, ";" if name != "strategy" else "did you mean 'on_policy'?"
    )


@pytest.mark.parametrize("value", [True, "one_step_off", 3, ["strategy"]])
def test_the_section_must_be_a_mapping(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(nested((OWN, value)))
    assert_one_line(caught, OWN, repr(value), "+async_pipeline=True")


def test_a_config_built_in_code_is_checked() -> None:
    with pytest.raises(ConfigError, match="must be 0 with strategy on_policy, got 1"):
        AsyncPipelineConfig.of({"strategy": "on_policy"})


@pytest.mark.parametrize(("path", "value"), [("a.b", 1), ("a", {"b": 1}), ("a.b.c", None), ("x", None)])
def test_select(path: str, value: Any) -> None:
    assert select({"a": {"b": 1}}, path) == value


# Arbitrary configs.

PATHS = (
    [key.path for key in FOREIGN]
    + [f"{OWN}.{name}" for name in knob_paths()]
    + [f"{OWN}.faults.bad_data.{kind}" for kind in POLICIES]
    + [*SWITCHES, OWN]
)
WORDS = sorted({part for path in PATHS for part in path.split(".")}) + ["other", "api_key", *POLICIES]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from([10**400, -(10**400), 1e308, 2**63]),
    st.sampled_from(["a\nb", "drop", "keep", "fail", "regenerate", "pause"]),
    st.sampled_from(["one-step-off", "naive", "m:C", "m:C@a->b", "n_step_ahead"]),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=2))
TREES = st.recursive(
    VALUES,
    lambda inner: st.dictionaries(st.sampled_from(WORDS) | st.integers(0, 1), inner, max_size=3),
    max_leaves=4,
)


def merge(into: dict[Any, Any], tree: Mapping[Any, Any]) -> dict[Any, Any]:
    for name, value in tree.items():
        inner = into.get(name)
        into[name] = merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return into


@pytest.mark.slow
@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(
    pairs=st.lists(st.tuples(st.sampled_from(PATHS), TREES), max_size=4),
    stray=st.dictionaries(st.sampled_from(WORDS), TREES, max_size=2),
)
def test_any_config_resolves_or_is_refused_in_one_line(
    pairs: list[tuple[str, Any]], stray: dict[str, Any]
) -> None:
    raw: dict[Any, Any] = dict(stray)
    for pair in pairs:
        merge(raw, nested(pair))
    for read in (is_enabled, resolve):
        try:
            read(raw)
        except ConfigError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    "pairs",
    [
        ((f"{OWN}.weight_sync.in_flight_policy", "keep"), ("partial_rollout", False)),
        ((f"{OWN}.weight_sync.every", 1), ("trigger_parameter_sync_step", 4)),
        ((f"{OWN}.staleness.oldest_share", 1.0), ("async_generation_ratio", 1.5)),
        (
            (f"{OWN}.weight_sync.gather_bucket_size_mb", 512),
            (f"{ROLLOUT}.param_update_preduce_bucket_size_mb", 64),
        ),
        ((f"{OWN}.staleness.oldest_share", 0.5), ("async_generation_ratio", 2)),
        (("trainer.generate_ahead_steps", 2), ("async_generation_ratio", 0.5)),
        (("trainer.generate_ahead_steps", 2), ("staleness_threshold", 0.5)),
    ],
)
def test_a_written_default_counts_as_the_users_choice(pairs: tuple[tuple[str, Any], ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(nested(*pairs))
    assert_one_line(caught, "keep one of them", *(path for path, _ in pairs))


def test_a_threshold_uses_the_steps_per_weight_update_of_either_key() -> None:
    config = resolve(nested(("staleness_threshold", 0.5), (f"{OWN}.weight_sync.every", 2))).config
    assert config == AsyncPipelineConfig.of(
        {"strategy": "fully_async", "staleness.max_lag": 2, "weight_sync.every": 2}
    )


def test_the_same_layout_in_two_notations_is_accepted() -> None:
    ratios = ("trainer.use_nodes_ratios", [0.5, 0.5, 0.5, 0.5])
    tasks = ("trainer.sperated_node_tasks", [["ref_logp", "logp", "actor-train"], "generate"])
    assert (
        resolve(nested(ratios, tasks, ("trainer.sperated_node_ratios", [0.5, 0.5]))).config.pools
        == resolve(nested(ratios)).config.pools
    )


def test_each_change_to_a_key_of_verl_is_noted() -> None:
    notes = resolve(
        nested(("require_batches", 4), (MINI_BATCH, 8), (BATCH, 16), ("pg_variant", "kimi15"))
    ).notes
    assert f"{BATCH} is set to 32" in notes
    assert f"{LOSS}.loss_mode is set to dro" in notes
    assert f"{LOSS}.dro_beta is set to 0.1" in notes


@pytest.mark.parametrize("mini", ["abc", None, [8]])
def test_a_wrong_mini_batch_size_is_left_to_verls_rules(mini: Any) -> None:
    assert resolve(nested(("require_batches", 4), (MINI_BATCH, mini), (BATCH, 16))).verl == {}


def test_an_error_on_a_quota_names_the_users_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(nested(("staleness_threshold", 1000), ("trigger_parameter_sync_step", 1000)))
    assert_one_line(
        caught,
        "staleness_threshold and trigger_parameter_sync_step must result in a max_lag of at most 1000, got "
        "1000999",
    )


def test_an_error_on_a_knob_names_the_keys_that_set_it() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(nested(("trigger_parameter_sync_step", 4), ("trainer.generate_ahead_steps", 2)))
    assert_one_line(
        caught,
        "weight_sync.every is set by trigger_parameter_sync_step",
        "staleness.max_lag is set by trainer.generate_ahead_steps",
    )
