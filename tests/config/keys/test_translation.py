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
from recipe.async_pipeline.config.keys.aliases import FOREIGN
from recipe.async_pipeline.config.keys.foreign_keys import LOSS_OF_VARIANT
from recipe.async_pipeline.config.keys.misplaced import SWITCHES
from recipe.async_pipeline.config.keys.translation import Translation, is_enabled, resolve
from recipe.async_pipeline.config.knobs.schema import AsyncPipelineConfig, canonical_strategy, knob_paths
from recipe.async_pipeline.config.paths import MODE, OWN, PATCH_FREE, select
from recipe.async_pipeline.core.groups.bad_data import POLICIES, Policies
from recipe.async_pipeline.errors import ConfigError
from tests.fakes.alias_values import LOSS, UNDERSTOOD, assert_one_line, nested, own
from tests.refusals import read_cases

BATCH, MINI_BATCH = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"


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


def test_groups_of_stages_and_their_shares_are_combined() -> None:
    tasks, ratios = [["logp", "actor-train"], "ref_logp", "generate"], [0.5, 0.25, 0.25]
    found = resolve(nested(("trainer.sperated_node_tasks", tasks), ("trainer.sperated_node_ratios", ratios)))
    assert found.config.pools == {
        "train": {"roles": ["train", "logp"], "share": 0.5},
        "ref_logp": {"roles": ["ref_logp"], "share": 0.25},
        "generate": {"roles": ["generate"], "share": 0.25},
    }
    assert found.notes[-1].endswith("-> pools train+logp 0.5, ref_logp 0.25, generate 0.25")


def test_old_log_probs_of_the_rollout_are_verls_bypass() -> None:
    path = "algorithm.rollout_correction.bypass_mode"
    assert resolve(own({"training.old_logp": "rollout"})).verl == {path: True}


def test_every_foreign_key_has_a_test() -> None:
    known = {key.path for key in FOREIGN}
    refused = {path for case in read_cases("config") if case.section == "config" for path in case.changes}
    assert known <= {path for path, *_ in UNDERSTOOD} | refused


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
        "faults.verify_checkpoint_at_start": True,
        "faults.notice_s": 90.0,
        "weight_sync.verify_tensors": 3,
        "fleet.max_replicas": 5,
        "staleness.depth": 2,
        "staleness.ess_floor": 0.5,
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
        "diffusion.guidance_scale": 4.5,
        "diffusion.ema_decay": 0.9,
        "diffusion.ema_every": 4,
        "diffusion.max_sequence_length": 77,
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


# Several keys.


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
