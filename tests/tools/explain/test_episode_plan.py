# SPDX-License-Identifier: Apache-2.0
"""`explain` says what the episodes of a run are, and who gives their rewards."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.agents.episodes import EndPolicies
from recipe.async_pipeline.config.knobs.agentic import AgenticConfig, GatewayConfig
from recipe.async_pipeline.tools.explain.episode_plan import describe_episodes


def said(loop: str | None = None, multi_turn: dict[str, Any] | None = None, **knobs: Any) -> list[str]:
    rollout = {"agent": {"default_agent_loop": loop}, "multi_turn": multi_turn or {}}
    return list(describe_episodes(AgenticConfig(**knobs), {"actor_rollout_ref": {"rollout": rollout}}))


@pytest.mark.parametrize("loop", [None, "single_turn_agent"])
def test_single_responses_are_no_episodes(loop: str | None) -> None:
    assert said(loop, attempts=3, redundancy=2) == []


def test_tools_of_verls_agent_loop() -> None:
    keys = {"function_tool_path": "/t/tools.py", "format": "brackets", "max_assistant_turns": 2}
    repeated = "one that fails is played 2 times at most, with its seed and without its group"
    assert said("tool_agent", keys, tool_timeout_s=10.0) == [
        "agent loop tool_agent with the tools of /t/tools.py, called in the format brackets",
        "at most 2 turns; deadline of an episode none, a tool call 10 s",
        repeated,
    ]
    assert said("mine", keys) == ["agent loop mine", "deadline of an episode none", repeated]


def test_an_environment() -> None:
    assert said(environment="frozen_lake", environment_kwargs={"size": 4}, episode_timeout_s=90.0) == [
        "environment frozen_lake(size=4), isolation process",
        "at most 16 turns; 64 at once in each agent loop worker; deadline of an episode 90 s, a "
        "reset or step 60 s",
        "one that fails is played 2 times at most, with its seed and without its group",
    ]


WARNING = "an agent that runs what the model writes needs verify, because the model can print one too"


@pytest.mark.parametrize(
    ("knobs", "kind", "reward"),
    [
        ({"agent": "python mine.py"}, "a command for each episode", WARNING),
        ({"agent": "mine:play"}, "a function", "or else the reward function's"),
        (
            {"agent": "external", "gateway": GatewayConfig(runners_dir="/r")},
            "programs outside of the run that claim tasks",
            "or else the reward function's",
        ),
        (
            {"agent": "python mine.py", "verify": "python judge.py"},
            "a command",
            "what python judge.py prints",
        ),
    ],
)
def test_who_gives_the_reward_of_an_agent(knobs: dict[str, Any], kind: str, reward: str) -> None:
    first, second, *more = said(**knobs)
    assert kind in first and second.endswith(reward)
    assert "deadline of an episode none" in more[-2]


def test_whether_commands_are_in_a_sandbox() -> None:
    command: dict[str, Any] = {"agent": "python mine.py"}
    assert any("in a sandbox on hosts that permit one" in line for line in said(**command))
    assert "its commands run in a sandbox (sandbox=on)" in said(
        agent="mine:play", verify="true", sandbox="on"
    )
    assert any("reach the gateway only" in line for line in said(sandbox="offline", **command))
    assert any("can read the files and processes" in line for line in said(sandbox="off", **command))
    assert not any("sandbox" in line for line in said(agent="mine:play"))


def test_a_gateway_that_other_hosts_reach() -> None:
    lines = said(agent="mine:play", gateway=GatewayConfig(host="0.0.0.0"))
    assert any("listens on 0.0.0.0, unencrypted: other hosts reach it" in line for line in lines)
    assert not any("listens on" in line for line in said(agent="mine:play"))


def test_an_agent_that_has_its_control_key() -> None:
    lines = said(agent="mine:play", gateway=GatewayConfig(agent_may_reward=True))
    assert "the agent has its control key: everything that it runs can set its reward" in lines


def last(*, ends: dict[str, Any], **knobs: Any) -> list[str]:
    """Return the lines about ends, which follow those about an environment and its limits."""
    return said(environment="frozen_lake", ends=EndPolicies(**ends), **knobs)[2:]


def test_failures_that_are_not_repeated() -> None:
    drop = {"env_failed": "drop", "agent_failed": "drop", "deadline": "drop"}
    changed = "ends that differ from the defaults: "
    assert last(ends=drop) == [
        "one that fails is not repeated: its group is bad data (failed_episode)",
        f"{changed}env_failed=drop, agent_failed=drop, deadline=drop",
    ]
    assert last(ends={}, attempts=1) == [
        "one that fails is not repeated: its group is bad data (failed_episode)"
    ]
    assert last(ends={"deadline": "drop"}, attempts=3) == [
        "one that ends as env_failed or agent_failed is played 3 times at most, with its seed and without "
        "its group",
        "one that ends as deadline is not repeated: its group is bad data (failed_episode)",
        f"{changed}deadline=drop",
    ]


def test_ends_that_are_scored_otherwise() -> None:
    assert last(ends={"turns": "score", "env_failed": "score"}, failure_reward=-1.0) == [
        "one that fails is played 2 times at most, with its seed and without its group",
        "ends that differ from the defaults: turns=score, env_failed=score (score: -1)",
    ]


def test_ends_that_an_agent_loop_does_not_know_are_not_described() -> None:
    lines = said(agent="mine:play", ends=EndPolicies(env_failed="drop"))
    assert lines[-1] == "one that fails is played 2 times at most, with its seed and without its group"
    lines = said("tool_agent", ends=EndPolicies(turns="score"))
    assert lines[-1].startswith("one that fails is played 2 times")


def test_rewards_by_turn_and_prefixes_of_episodes() -> None:
    knobs = AgenticConfig(environment="frozen_lake", turn_rewards=True)
    lines = list(describe_episodes(knobs, {}, "session"))
    assert lines[2] == "each reward is at the last token of its turn (turn_rewards)"
    assert lines[3].endswith("use the keys and values of their episode (reuse_prefixes=session)")
