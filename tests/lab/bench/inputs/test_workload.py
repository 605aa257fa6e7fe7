# SPDX-License-Identifier: Apache-2.0
"""Workload files: the shipped ones have a reason and fit all arms; an invalid one is an error of one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.bench.inputs.arms import ARMS
from recipe.async_pipeline.lab.bench.inputs.workload import load, names
from recipe.async_pipeline.lab.tasks.model import ModelSpec


def test_names_of_the_shipped_workloads() -> None:
    assert names() == [
        "agentic_lake",
        "agentic_wait",
        "compute",
        "image",
        "long_tail",
        "slow_reference",
        "slow_reward",
    ]


@pytest.mark.parametrize("name", names())
def test_a_shipped_workload_has_a_reason_and_fits_every_arm(name: str) -> None:
    workload = load(name)
    assert len(workload.reason) > 40
    deepest = max(arm.batches_in_flight for arm in ARMS.values() if arm is not ARMS["n_step_ahead_lag6"])
    assert workload.warmup >= deepest, "the deepest pipeline is full when the measurement starts"
    assert workload.cooldown >= deepest, "the deepest pipeline is full when the measurement ends"
    # Micro-batches must divide the samples of each of the two training ranks.
    samples = workload.overrides.get("data.train_batch_size", 16) * workload.overrides.get(
        "actor_rollout_ref.rollout.n", 8
    )
    micro = workload.overrides.get("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 64)
    assert samples % (2 * micro) == 0


@pytest.mark.parametrize("name", names())
def test_the_toy_model_is_long_enough_for_a_shipped_workload(name: str) -> None:
    overrides = load(name).overrides
    longest = overrides.get("actor_rollout_ref.rollout.max_model_len", 0)
    assert max(longest, overrides.get("data.max_response_length", 0)) <= ModelSpec().max_positions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "reason"),
        ("reason: r\nsteps: many", "steps"),
        ("reason: r\nstep: 3", "step"),
        ("reason: r\nepisode: {turns: 2}", "tool_s must be set exactly if turns > 1"),
        ("reason: r\nepisode: {turns: 0}", "turns must be >= 1"),
        ("reason: r\nepisode: {environment: pond}", "Invalid enum value .pond."),
        ("reason: r\ntask: video", "Invalid enum value .video."),
        (
            "reason: r\ntask: image\nepisode: {turns: 2, tool_s: {median: 1, sigma: 0, cap: 1}}",
            "task=image requires no episode",
        ),
        (
            "reason: r\nepisode: {environment: frozen_lake}",
            "requires turns > 1 and no answer_tokens, got tur",
        ),
        ("reason: r\njudge_s: {median: 3, sigma: 1, cap: 1}", "0 < median <= cap"),
        ("reason: [", "workload"),
        ("reason: r\nsteps: 0", "steps and warmup must be >= 1"),
        ("reason: r\nwarmup: 0", "the first step is never measured"),
        ("reason: r\ncooldown: -1", "cooldown >= 0"),
        ("reason: r\n  steps: 3", "workload"),
    ],
)
def test_an_invalid_file_is_an_error_of_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(str(path))
    assert "\n" not in str(caught.value)


def test_a_directory_is_not_a_workload(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        load(str(tmp_path / "w.yaml"))


def test_an_unknown_name_lists_the_shipped_workloads() -> None:
    with pytest.raises(ConfigError, match="no workload 'agentic'; use one of agentic_lake, agentic_wait"):
        load("agentic")


def test_a_custom_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("reason: r\nepisode: {turns: 2, tool_s: {median: 1, sigma: 0, cap: 1}}\nsteps: 3")
    workload = load(str(path))
    assert (workload.episode.turns, workload.total_steps, workload.prompts_per_step) == (2, 11, 16)
