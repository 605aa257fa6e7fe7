# SPDX-License-Identifier: Apache-2.0
"""Which knobs of agents and environments go together, and which agent loop they select."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.knobs.agentic import (
    AGENT_LOOP,
    MAX_UNIX_DIR,
    OF_AGENTS,
    OF_BOTH,
    OF_ENVIRONMENTS,
    AgenticConfig,
    agent_loop_for,
)
from recipe.async_pipeline.config.knobs.schema import AsyncPipelineConfig
from recipe.async_pipeline.errors import ConfigError

ALLOWED: list[dict[str, Any]] = [
    {"attempts": 1, "episode_timeout_s": 99},
    {"attempts": 2, "episode_timeout_s": 49.9},
    {"attempts": 1000},
    {"agent": "external", "gateway.runners_dir": "/tmp/runners"},
    {"agent": "m:f", "turn_rewards": True, "gateway.max_chains": 1},
    {"environment": "m:C", "turn_rewards": True},
    {"agent": "m:f", "ends.chains": "score"},
    {"environment": "m:C", "redundancy": 2},
    {"agent": "m:f", "gateway.host": "0.0.0.0"},
]
"""Next to what `tests/config/refusals.txt` has."""


@pytest.mark.parametrize("values", ALLOWED)
def test_what_a_run_may_have(values: dict[str, Any]) -> None:
    own = {"environment": "m:C"} if "attempts" in values else {}
    knobs = {f"agentic.{name}": value for name, value in (own | values).items()}
    AsyncPipelineConfig.of({**knobs, "faults.wait_timeout_s": 100})


KEYS = {"environment": ("frozen_lake", "environment"), "agent": ("python a.py", "agent_session")}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("chosen", [None, "single_turn_agent", "environment", "agent_session", "tool_agent"])
def test_an_environment_or_an_agent_selects_its_agent_loop(chosen: str | None, key: str) -> None:
    raw = {"actor_rollout_ref": {"rollout": {"agent": {"default_agent_loop": chosen}}}}
    assert agent_loop_for({}, raw) == {}
    value, loop = KEYS[key]
    own = {f"agentic.{key}": value}
    if chosen in (None, "single_turn_agent", loop):
        assert agent_loop_for(own, raw) == {AGENT_LOOP: loop}
    else:
        with pytest.raises(ConfigError, match=f"{key} requires the agent loop {loop}, but .* is '{chosen}'"):
            agent_loop_for(own, raw)


@pytest.mark.parametrize("chosen", [None, "single_turn_agent", "environment", "agent_session"])
def test_of_an_environment_and_an_agent_the_user_chooses_the_default(chosen: str | None) -> None:
    raw = {"actor_rollout_ref": {"rollout": {"agent": {"default_agent_loop": chosen}}}}
    own = {f"agentic.{key}": value for key, (value, _) in KEYS.items()}
    if chosen in ("environment", "agent_session"):
        assert agent_loop_for(own, raw) == {AGENT_LOOP: chosen}
    else:
        with pytest.raises(ConfigError, match=r"are both set, so .* must be environment or agent_session"):
            agent_loop_for(own, raw)


VALUES = {
    "environment_kwargs": {"size": 5},
    "isolation": "thread",
    "turn_rewards": True,
    "failure_reward": -1.0,
    "agent_env": {"A": "b"},
    "verify": "true",
    "sandbox": "on",
    "sandbox_hidden": ("/data",),
}


@pytest.mark.parametrize(
    ("knob", "needed"),
    [
        *((knob, ("environment",)) for knob in OF_ENVIRONMENTS),
        *((knob, ("environment", "agent")) for knob in OF_BOTH),
        *((knob, ("agent",)) for knob in OF_AGENTS if knob != "gateway"),
        ("gateway.max_chains", ("agent",)),
    ],
)
def test_a_knob_requires_what_it_is_for(knob: str, needed: tuple[str, ...]) -> None:
    value = VALUES.get(knob, 3)
    either = " or ".join(f".*agentic.{one}" for one in needed)
    with pytest.raises(ConfigError, match=rf"agentic.{knob}=.* requires {either}; set it"):
        AsyncPipelineConfig.of({f"agentic.{knob}": value})
    for one in needed:
        chains = {"agentic.gateway.max_chains": 1} if knob == "turn_rewards" and one == "agent" else {}
        command = {"agentic.agent": "true"} if knob in ("agent_env", "sandbox") else {}
        needs = {f"agentic.{one}": KEYS[one][0], **chains, **command}
        found = AsyncPipelineConfig.of({f"agentic.{knob}": value, **needs}).agentic
        assert (found.gateway.max_chains if knob.startswith("gateway") else getattr(found, knob)) == value


def test_variables_of_a_command_are_text() -> None:
    given = {"A": "b", "PORT": 8080, "SHARE": 0.5, "ON": True, "OFF": False}
    found = AsyncPipelineConfig.of({"agentic.agent": "true", "agentic.agent_env": given}).agentic.variables()
    assert found == {"A": "b", "PORT": "8080", "SHARE": "0.5", "ON": "true", "OFF": "false"}
    assert AgenticConfig().variables() == {}


def test_conversations_follow_the_turns_unless_they_are_set() -> None:
    values = {"agentic.agent": "m:f", "agentic.max_turns": 40}
    assert AsyncPipelineConfig.of(values).agentic.max_chains == 40
    assert AsyncPipelineConfig.of({**values, "agentic.gateway.max_chains": 3}).agentic.max_chains == 3


def test_the_path_of_a_unix_socket_is_limited() -> None:
    knob = "agentic.gateway.unix_dir"
    values = {"agentic.agent": "m:f", knob: "/tmp/" + "a" * (MAX_UNIX_DIR - 5)}
    assert AsyncPipelineConfig.of(values).agentic.gateway.unix_dir == values[knob]
    with pytest.raises(ConfigError, match=r"unix_dir must have at most 80 bytes .*; name a shorter one"):
        AsyncPipelineConfig.of({**values, knob: values[knob] + "a"})


def test_verify_may_use_any_model() -> None:
    values = {"agentic.agent": "m:f", "agentic.agent_env": {"OPENAI_API_KEY": "abc"}}
    assert AsyncPipelineConfig.of({**values, "agentic.verify": "true"}).agentic.variables()
