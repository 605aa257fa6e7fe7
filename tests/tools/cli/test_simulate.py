# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from recipe.async_pipeline.cli import main
from recipe.async_pipeline.console import EXIT_USERS
from recipe.async_pipeline.tools.plan.profile import Batch, dump
from tests.tools.plan.workloads import profile


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "p.yaml"
    file.write_text(
        dump(
            msgspec.structs.replace(
                profile(), batch=Batch(groups_per_device=1.0, answers=4), devices_per_node=2
            )
        )
    )
    return str(file)


def simulate(path: str, strategy: str, *more: str) -> int:
    """Simulate a strategy on eight devices; return the exit status."""
    return main.main(["simulate", "--profile", path, "--devices", "8", "--strategy", strategy, *more])


def test_devices_without_a_possible_split_are_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(dump(msgspec.structs.replace(profile(), devices_per_replica=3, devices_per_node=2)))
    assert simulate(str(file), "on_policy") == EXIT_USERS
    assert "of 2 layouts fail like this one: train " in capsys.readouterr().err


def test_json_has_exactly_these_keys(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(path, "one-step-off", "--steps", "16", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts) == [
        "step_s",
        "device_s",
        "bound_s",
        "overlap_efficiency",
        "speedup_vs_sync",
        "lag",
        "idle",
        "linearity",
        "events_per_s",
        "wall_s",
    ]
    assert facts["overlap_efficiency"] == pytest.approx(facts["bound_s"] / facts["step_s"], rel=1e-3)
    assert facts["device_s"] == pytest.approx(8 * facts["step_s"])
    assert facts["lag"]["max"] == 1
    assert set(facts["idle"]) == {"train", "generate"}
    assert facts["linearity"] == pytest.approx(1.0)
    assert facts["wall_s"] > 0


ONE_TRAINS_TWO_DRAW = "{train:{roles:[train],devices:1},generate:{roles:[generate],devices:2}}"


@pytest.mark.parametrize(
    ("profile", "strategy", "step_s"),
    [
        ("flow_grpo", "on_policy", 32 * 0.2667 + 0.15 + 64 * 0.3115),
        ("flow_grpo", "one_step_off", 64 / 3.21),
        ("flow_grpo", "fully_async", 64 / 3.21),
        ("flow_grpo_late_rewards", "on_policy", 32 * 0.2667 + 9.6 + 64 * 0.3115),
        ("flow_grpo_late_rewards", "one_step_off", 64 / 3.21),
    ],
)
def test_images_cost_what_their_profile_says(
    profile: str, strategy: str, step_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """One device trains 3.21 images a second, two draw twice 3.75. Old log-probs are the rollout's: a batch
    does not wait for the training devices, and a lag of one step hides rewards after generation.
    """
    layout = ("--devices", "3", "--pools", ONE_TRAINS_TWO_DRAW)
    assert main.main(["simulate", "--profile", profile, "--strategy", strategy, *layout, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["step_s"] == pytest.approx(step_s, rel=5e-3)
    assert facts["device_s"] == pytest.approx(3 * step_s, rel=5e-3)


def test_no_step_is_more_efficient_than_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    """The few steps of the window happen to have shorter responses than all ten, which the bound counts."""
    command = ["simulate", "--profile", "agentic_wait_cpu", "--devices", "4", "--strategy", "one_step_off"]
    few = [*command, "--steps", "10", "--seed", "3"]
    assert main.main([*few, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["bound_s"] > facts["step_s"] and facts["overlap_efficiency"] == 1.0
    assert main.main(few) == 0
    assert "efficiency 100% (the averaged steps have shorter responses" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("os:path", "--strategy: strategy os:path must be a class, got module; name a class"),
        (
            "recipe.async_pipeline:RoleStateMachine",
            "--strategy: strategy recipe.async_pipeline:RoleStateMachine must subclass recipe",
        ),
        (
            "nosuch:X",
            "--strategy names module 'nosuch', which cannot be found, got 'nosuch:X'; check PYTHONPATH",
        ),
    ],
)
def test_what_is_no_strategy_is_refused_as_explain_refuses_it(
    strategy: str, why: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(path, strategy) == EXIT_USERS
    assert why in capsys.readouterr().err


def test_text_has_the_main_figures(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(path, "n_step_ahead", "--steps", "20") == 0
    output = capsys.readouterr().out
    for part in (
        "for tests",
        "the lower bound is",
        "device-seconds per step",
        "the best synchronous layout",
        "3 allowed",
        "linearity",
        "idle          train",
    ):
        assert part in output


@pytest.mark.parametrize(
    "written",
    [
        "{a: {roles: [train], devices: 2}, b: {roles: [logp], devices: 2}, c: {roles: [generate], devices: "
        "4}}",
        "{a:{roles:[train],devices:2},b:{roles:[logp],devices:2},c:{roles:[generate],devices:4}}",
    ],
)
def test_pools_are_parsed_like_an_override(
    written: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(path, "one_step_off", "--pools", written, "--steps", "16", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)["idle"]) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "8"], "--strategy is missing"),
        (["--strategy", "one_step_off"], "--devices is missing"),
        (["--strategy", "one_step_off", "--devices", "8", "--seed", "-1"], "--seed must be >= 0, got -1"),
        (["--strategy", "one_step_off", "--devices", "1"], "--devices must be >= 2, got 1"),
        (["--strategy", "soon", "--devices", "8"], "--strategy must be one of on_policy"),
        (
            ["--strategy", "one_step_off", "--devices", "8", "--steps", "5"],
            "--steps must be at least 10 with max_lag 1, got 5",
        ),
        (
            ["--strategy", "one_step_off", "--devices", "8", "--pools", "{"],
            "--pools must be a mapping as in a hydra override",
        ),
        (
            ["--strategy", "one_step_off", "--devices", "8", "--pools", "{a: {roles: [train], device: 2}}"],
            "--pools.a.device is unknown",
        ),
    ],
)
def test_a_user_error_is_one_line(
    path: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["simulate", "--profile", path, *arguments]) == EXIT_USERS
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
