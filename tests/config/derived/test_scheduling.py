# SPDX-License-Identifier: Apache-2.0
"""What follows from the knobs: the schedule, the steps with noise, how many replicas load at once."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.config.derived.scheduling import (
    PATHS,
    OpenRequests,
    as_settings,
    of_settings,
    proximal_policy,
    read_before_update,
    schedule_of,
)
from recipe.async_pipeline.config.knobs.schema import (
    AsyncPipelineConfig,
    StalenessConfig,
    TrainingConfig,
    knob_paths,
)
from recipe.async_pipeline.config.knobs.weight_sync import SHORT_COMMIT_S, WeightSyncConfig, concurrent_loads
from recipe.async_pipeline.config.placement import Placement, Pool
from recipe.async_pipeline.core.schedule import Schedule
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.strategies import FullyAsync, NStepAhead


def test_each_field_is_a_knob_or_of_the_run() -> None:
    knobs = AsyncPipelineConfig(
        strategy="fully_async",
        staleness=StalenessConfig(max_lag=5, depth=4, ess_floor=0.5, oldest_share=0.5, straggler="drop"),
        weight_sync=WeightSyncConfig(every=2),
        training=TrainingConfig(ref_refresh_every=3),
    )
    of_the_run: dict[str, Any] = {
        "batch": 8,
        "first_step": 3,
        "last_step": 9,
        "old_logp": "rollout",
        "validate_every": 4,
        "validate_first": True,
        "save_every": 5,
    }
    found = schedule_of(knobs, **of_the_run)
    assert type(found) is FullyAsync
    default = Schedule(batch=1, last_step=1)
    for field in fields(Schedule):
        assert getattr(found, field.name) != getattr(default, field.name), f"{field.name} is not passed on"


def test_a_trainer_may_pass_another_class() -> None:
    knobs = AsyncPipelineConfig.of({"strategy": "fully_async", "staleness.max_lag": 1})
    assert type(schedule_of(knobs, strategy=NStepAhead, batch=1, last_step=1)) is NStepAhead


@pytest.mark.parametrize(
    ("knobs", "size", "within"),
    [
        ({}, None, None),
        ({"sde_window_size": 3}, 3, [0, 9]),
        ({"sde_window_size": 3, "sde_window_end": 5}, 3, [0, 5]),
        ({"sde_window_size": 2, "sde_window_first": 1, "num_inference_steps": 4}, 2, [1, 3]),
    ],
)
def test_a_window_is_before_the_last_step(knobs: dict[str, Any], size: int | None, within: Any) -> None:
    found = AsyncPipelineConfig.of({"diffusion": knobs}).diffusion.denoising()
    assert (found["sde_window_size"], found["sde_window_range"]) == (size, within)


@pytest.mark.parametrize(
    ("asked", "replicas", "at_once"),
    [(None, 1, 1), (None, 7, 1), (None, 16, 2), (None, 512, 64), (3, 16, 3), (9, 4, 4)],
)
def test_an_eighth_of_the_replicas_load_at_once_by_default(
    asked: int | None, replicas: int, at_once: int
) -> None:
    assert concurrent_loads(asked, replicas) == at_once
    assert concurrent_loads(asked, replicas, SHORT_COMMIT_S + 0.01) == at_once


@pytest.mark.parametrize(("asked", "at_once"), [(None, 24), (2, 2), (99, 24)])
def test_short_loads_take_no_turns_by_default(asked: int | None, at_once: int) -> None:
    assert concurrent_loads(asked, 24, SHORT_COMMIT_S) == at_once


def test_every_entry_is_a_knob() -> None:
    assert {*PATHS} <= {*knob_paths()}
    assert tuple(as_settings(AsyncPipelineConfig(), None)) == PATHS


@pytest.mark.parametrize("straggler", ["wait", "regenerate", "drop", "mask"])
def test_it_is_read_as_it_was_written(straggler: str) -> None:
    knobs = AsyncPipelineConfig.of(
        {
            "strategy": "n_step_ahead",
            "staleness.max_lag": 3,
            "staleness.depth": 2,
            "staleness.straggler": straggler,
            "weight_sync.every": 2,
        }
    )
    assert of_settings(as_settings(knobs, None)) == knobs
    assert as_settings(knobs, None)["staleness.straggler"] == straggler
    assert of_settings(as_settings(knobs, "trainer")).training.old_logp == "trainer"


WORKERS = 8


def bounds(
    bound: int | None = None,
    *,
    engine_slots: int = 256,
    workers: int = WORKERS,
    groups_per_step: int = 512,
    responses_per_group: int = 16,
    max_lag: int = 1,
) -> OpenRequests:
    values = {"rollout.max_open_requests": bound, "staleness.max_lag": max_lag, "strategy": "fully_async"}
    return OpenRequests.of(
        AsyncPipelineConfig.of(values),
        engine_slots=engine_slots,
        workers=workers,
        groups_per_step=groups_per_step,
        responses_per_group=responses_per_group,
    )


def test_by_default_a_replica_holds_twice_what_it_generates() -> None:
    assert bounds() == OpenRequests(share=64, per_replica=512, groups=1024)


def test_the_knob_is_divided_among_the_workers() -> None:
    assert bounds(100) == OpenRequests(share=12, per_replica=96, groups=1024)


def test_each_worker_has_a_share_of_one_at_least() -> None:
    assert bounds(3) == OpenRequests(share=1, per_replica=WORKERS, groups=1024)


@pytest.mark.parametrize(("groups", "share"), [(1, 256), (2, 128), (3, 85), (4, 64), (5, 64)])
def test_workers_without_groups_have_no_share(groups: int, share: int) -> None:
    """With max_lag 1, two groups are in flight for each group of a step."""
    assert bounds(groups_per_step=groups).share == share


def test_by_default_a_whole_group_fits_in_a_share() -> None:
    assert bounds(engine_slots=64, responses_per_group=32).share == 32
    assert bounds(engine_slots=8, responses_per_group=32).share == 8, "but no more than the engine generates"


@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 40), st.integers(1, 80), st.integers(0, 3))
def test_by_default_the_engine_does_not_run_dry(
    slots: int, workers: int, groups: int, answers: int, lag: int
) -> None:
    """If as many workers as possible use their shares, more is open than the engine generates at once."""
    made = bounds(
        engine_slots=slots,
        workers=workers,
        groups_per_step=groups,
        responses_per_group=answers,
        max_lag=lag,
    )
    assert made.share >= min(answers, slots)
    assert made.per_replica >= slots


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.max_open_requests must be >= 1 and .*, got 0"):
        bounds(0)


SHARED = Placement((Pool("train", ("train", "logp"), (1,)), Pool("generate", ("generate",), (1,))))
APART = Placement((Pool("train", ("train",), (1,)), Pool("logp", ("logp",), (1,))))


def of_verl(**changes: Any) -> dict[str, Any]:
    """A config of one update a step; `changes` by path, with two underscores for a dot."""
    config: dict[str, Any] = {
        "data": {"train_batch_size": 16},
        "algorithm": {"use_kl_in_reward": False},
        "actor_rollout_ref": {
            "actor": {"strategy": "fsdp2", "ppo_mini_batch_size": 16, "ppo_epochs": 1},
            "rollout": {"name": "vllm"},
        },
    }
    for path, value in changes.items():
        *sections, name = path.split("__")
        section = config
        for one in sections:
            section = section.setdefault(one, {})
        section[name] = value
    return config


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("actor_rollout_ref__actor__ppo_mini_batch_size", 8),
        ("actor_rollout_ref__actor__ppo_epochs", 2),
        ("actor_rollout_ref__actor__strategy", "veomni"),
        ("actor_rollout_ref__rollout__name", "diffusers"),
        ("algorithm__use_kl_in_reward", True),
        ("algorithm__rollout_correction__rollout_rs", "token_k1"),
        ("algorithm__rollout_correction__rollout_is_batch_normalize", True),
        ("trainer__critic_warmup", 3),
        ("trainer__v1__async_pipeline__custom_stages", ["m:C@a->b"]),
    ],
)
def test_what_reads_them_before_the_update_is_named(change: str, value: Any) -> None:
    reader = read_before_update(of_verl(**{change: value}))
    assert reader is not None and reader.startswith(f"{change.replace('__', '.')}={value}, because ")


def test_one_update_a_step_needs_no_pass() -> None:
    assert read_before_update(of_verl()) is None
    assert read_before_update(of_verl(algorithm__rollout_correction__rollout_is="token")) is None


@pytest.mark.parametrize(
    ("placement", "lag", "reader", "found"),
    [
        (SHARED, 0, None, "update"),
        (SHARED, 3, None, "update"),
        (SHARED, 3, "KEY=1, because", "trainer"),
        (APART, 3, None, "logp_pool"),
        (APART, 0, None, "trainer"),
    ],
)
def test_the_default(placement: Placement, lag: int, reader: str | None, found: str) -> None:
    strategy = "n_step_ahead" if lag else "on_policy"
    knobs = AsyncPipelineConfig(strategy=strategy, staleness=StalenessConfig(max_lag=lag))
    assert proximal_policy(knobs, placement, bypass=False, reader=reader) == found
    assert proximal_policy(knobs, placement, bypass=True, reader=reader) == "rollout"


@pytest.mark.parametrize(
    ("placement", "reader", "why"), [(SHARED, "KEY=1, because", "KEY=1, because"), (APART, None, "pool")]
)
def test_an_update_that_cannot_have_them_is_refused(
    placement: Placement, reader: str | None, why: str
) -> None:
    knobs = AsyncPipelineConfig(training=TrainingConfig(old_logp="update"))
    with pytest.raises(ConfigError, match=f"old_logp must not be update.*{why}.*use auto"):
        proximal_policy(knobs, placement, bypass=False, reader=reader)
