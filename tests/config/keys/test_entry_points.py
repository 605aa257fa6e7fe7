# SPDX-License-Identifier: Apache-2.0
"""Configurations of verl's other entry points become main_ppo's."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.keys.entry_points import (
    DAPO,
    ENTRY_POINTS,
    FULLY_ASYNC,
    ONE_STEP_OFF,
    entry_of_command,
    entry_of_runner,
    rewritten,
)
from recipe.async_pipeline.config.keys.translation import resolve
from recipe.async_pipeline.config.paths import OWN, nested

ROLLOUT = "actor_rollout_ref.rollout"
MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
SECTION = {
    "async_training.staleness_threshold": 0.1,
    "async_training.trigger_parameter_sync_step": 4,
    "async_training.require_batches": 2,
    "async_training.use_dynamic_resource_scheduling": False,
    "async_training.concurrent_samples_per_replica": 16,
}


def config(**values: Any) -> dict[str, Any]:
    return nested({MINI_BATCH: 32, **SECTION, **values})


def at(path: str, value: Any) -> dict[str, Any]:
    return config(**{path: value})


@pytest.mark.parametrize(
    ("path", "value", "values"),
    [
        ("rollout.nnodes", 2, {f"{ROLLOUT}.nnodes": 2}),
        ("rollout.n_gpus_per_node", 4, {f"{ROLLOUT}.n_gpus_per_node": 4}),
        # A step trains 2 x 32 prompts, and a rest is not trained.
        ("rollout.total_rollout_steps", 1000, {"trainer.total_training_steps": 15}),
        # verl counts versions of 4 steps.
        ("trainer.test_freq", 5, {"trainer.test_freq": 20}),
        ("trainer.save_freq", 10, {"trainer.save_freq": 40}),
        ("rollout.test_freq", 1, {"trainer.test_freq": 4}),
        ("trainer.test_freq", -1, {}),
        ("data.gen_batch_size", 1, {"data.gen_batch_size": None}),
        (f"{ROLLOUT}.standalone_gpu_memory_utilization", 0.8, {f"{ROLLOUT}.gpu_memory_utilization": 0.8}),
        (
            f"{ROLLOUT}.checkpoint_engine.backend",
            "nccl",
            {f"{ROLLOUT}.checkpoint_engine.backend": "dual_buffer"},
        ),
        ("rollout.n", 4, {}),
        ("async_training.use_trainer_do_validate", True, {}),
        ("async_training.use_rollout_log_probs", False, {f"{OWN}.training.old_logp": "trainer"}),
        ("async_training.use_rollout_log_probs", True, {}),
        ("async_training.compute_prox_log_prob", True, {f"{OWN}.training.old_logp": "trainer"}),
    ],
)
def test_keys_of_fully_async(path: str, value: Any, values: dict[str, Any]) -> None:
    found = rewritten(at(path, value), FULLY_ASYNC)
    assert found.values == {"async_strategy": "fully_async", **values}


def test_two_keys_of_one_meaning_hide_nothing() -> None:
    both = {"trainer.test_freq": 5, "rollout.test_freq": 2}
    assert (
        "rollout.test_freq must equal trainer.test_freq=5, got 2"
        in rewritten(config(**both), FULLY_ASYNC).problems[0]
    )
    every_step = {"async_training.trigger_parameter_sync_step": 1, "rollout.test_freq": 2}
    assert rewritten(config(**every_step), FULLY_ASYNC).values["trainer.test_freq"] == 2
    steps = {"rollout.total_rollout_steps": 640, "trainer.total_training_steps": 7}
    notes = rewritten(config(**steps), FULLY_ASYNC).notes
    assert any("total_training_steps=10, instead of 7" in note for note in notes)


def test_what_is_left_is_understood_by_a_run() -> None:
    raw = config(**{"rollout.nnodes": 1, "rollout.total_rollout_steps": 640, "data.train_batch_size": 0})
    found = rewritten(raw, FULLY_ASYNC)
    assert "rollout" in found.removed
    for path in found.removed:
        section, _, name = path.rpartition(".")
        (raw[section] if section else raw).pop(name, None)
    translation = resolve(raw | {"async_strategy": "fully_async"})
    # (1 + 0.1) x 4 batches are in flight or waiting.
    assert translation.config.staleness.max_lag == 4 and translation.config.weight_sync.every == 4
    assert translation.verl["data.train_batch_size"] == 64


def test_only_what_changes_something_is_reported() -> None:
    found = rewritten(config(), FULLY_ASYNC)
    assert found.notes == (f"{FULLY_ASYNC.module} -> async_strategy=fully_async",)
    found = rewritten(at("async_training.concurrent_samples_per_replica", 8), FULLY_ASYNC)
    assert any("concurrent_samples_per_replica=8 -> ignored" in note for note in found.notes)


def test_a_strategy_or_lag_of_the_user_replaces_defaults_only() -> None:
    own = f"{OWN}.staleness.max_lag"
    found = rewritten(at(own, 2), FULLY_ASYNC)
    assert found.values == {}
    assert {"async_training.staleness_threshold", "async_training.trigger_parameter_sync_step"} <= set(
        found.removed
    )
    chosen = rewritten(config(**{own: 2, "async_training.staleness_threshold": 0.5}), FULLY_ASYNC)
    assert "async_training.staleness_threshold" not in chosen.removed
    assert rewritten(nested({"async_strategy": "on_policy"}), ONE_STEP_OFF).values == {}


def test_every_problem_is_named_at_once() -> None:
    raw = config(
        **{
            "rollout.nnodes": 0,
            "rollout.total_rollout_steps": 10,
            "rollout.fancy": 1,
            "async_training.use_dynamic_resource_scheduling": True,
            "async_training.fancy.deep": 2,
        }
    )
    found = rewritten(raw, FULLY_ASYNC)
    assert {"rollout", "async_training.fancy"} <= {*found.removed}, "no later check sees them"
    for part, problem in zip(
        (
            "rollout.nnodes must be a number >= 1, got 0",
            "total_rollout_steps must be at least the 64 prompts of a step, got 10",
            "use_dynamic_resource_scheduling must be False",
            "rollout.fancy is not supported",
            "async_training.fancy.deep is not supported",
        ),
        found.problems,
        strict=True,
    ):
        assert part in problem


def test_the_size_of_a_step_is_needed() -> None:
    (problem,) = rewritten(nested({"rollout.total_rollout_steps": 10}), FULLY_ASYNC).problems
    assert "needs the size of a step" in problem


@pytest.mark.parametrize(
    ("section", "values", "problem"),
    [
        (8, {}, ""),
        (2, {f"{ROLLOUT}.n_gpus_per_node": 2}, ""),
        (4, {}, f"rollout.n_gpus_per_node must be {ROLLOUT}.n_gpus_per_node=2, got 4; keep one of them"),
    ],
    ids=["default", "equal", "different"],
)
def test_a_pool_that_main_ppos_keys_describe_is_kept(
    section: int, values: dict[str, Any], problem: str
) -> None:
    pool = {f"{ROLLOUT}.nnodes": 1, f"{ROLLOUT}.n_gpus_per_node": 2}
    found = rewritten(nested({"rollout.n_gpus_per_node": section, **pool}), ONE_STEP_OFF)
    sizes = {path: value for path, value in found.values.items() if path.startswith(ROLLOUT)}
    assert (sizes, found.problems) == (values, (problem,) if problem else ())


def test_one_step_off_and_dapo() -> None:
    found = rewritten(nested({"rollout.nnodes": 1, "rollout.n_gpus_per_node": 8}), ONE_STEP_OFF)
    assert found.values == {
        "async_strategy": "one_step_off",
        f"{ROLLOUT}.nnodes": 1,
        f"{ROLLOUT}.n_gpus_per_node": 8,
    }
    assert rewritten(nested({"data.gen_batch_size": 96}), DAPO).values == {"data.gen_batch_size": None}
    (problem,) = rewritten(nested({"rollout.nnodes": 1}), DAPO).problems
    assert "rollout.nnodes is not supported" in problem


@pytest.mark.parametrize(
    ("name", "overrides", "entry"),
    [
        ("ppo_trainer", ["trainer.nnodes=1", "actor_rollout_ref.rollout.nnodes=1"], None),
        ("fully_async_ppo_trainer.yaml", [], FULLY_ASYNC),
        ("fully_async_ppo_megatron_trainer", [], FULLY_ASYNC),
        ("one_step_off_ppo_trainer", ["rollout.nnodes=1"], ONE_STEP_OFF),
        ("dapo_trainer", [], DAPO),
        ("ppo_trainer", ["rollout.nnodes=1", "rollout.total_rollout_steps=5"], FULLY_ASYNC),
        ("ppo_trainer", ["async_training.partial_rollout=True"], FULLY_ASYNC),
        ("ppo_trainer", ["rollout.nnodes=1"], ONE_STEP_OFF),
        # With a plus it is a key that main_ppo's configuration gets.
        ("ppo_trainer", ["+async_training.staleness_threshold=1"], None),
    ],
)
def test_a_command_line_is_recognised(name: str, overrides: list[str], entry: Any) -> None:
    assert entry_of_command(name, overrides) is entry


def test_a_task_runner_is_recognised() -> None:
    assert [entry_of_runner(entry.runner) for entry in ENTRY_POINTS] == list(ENTRY_POINTS)
    assert entry_of_runner("MyTaskRunner") is None
