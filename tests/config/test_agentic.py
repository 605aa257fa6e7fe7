# SPDX-License-Identifier: Apache-2.0
"""All attempts at an episode must end before the run gives up on its group."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.agentic import (
    AGENT_LOOP,
    MAX_UNIX_DIR,
    OF_AGENTS,
    OF_BOTH,
    OF_ENVIRONMENTS,
    AgenticConfig,
    GatewayConfig,
    agent_loop_for,
)
from recipe.async_pipeline.config.schema import AsyncPipelineConfig
from recipe.async_pipeline.errors import ConfigError


@pytest.mark.parametrize(("attempts", "timeout_s", "fits"), [(1, 99, True), (2, 49.9, True), (2, 50, False)])
def test_all_attempts_must_fit(attempts: int, timeout_s: float, fits: bool) -> None:
    agentic = {"attempts": attempts, "episode_timeout_s": timeout_s}
    values = {"agentic": agentic, "faults": {"wait_timeout_s": 100}}
    if fits:
        assert AsyncPipelineConfig.of(values).agentic.episode_timeout_s == timeout_s
    else:
        with pytest.raises(ConfigError, match="episode_timeout_s must be below 50, .* got 50; lower it"):
            AsyncPipelineConfig.of(values)


def test_external_runners_require_a_folder_and_the_other_way_round() -> None:
    folder = GatewayConfig(runners_dir="/tmp/runners")
    assert AgenticConfig(agent="external", gateway=folder).gateway.lease_s == 60
    for agent, gateway in (("external", GatewayConfig()), ("python a.py", folder)):
        with pytest.raises(
            ConfigError, match="agent=external and .*runners_dir require each other, got agent="
        ):
            AgenticConfig(agent=agent, gateway=gateway)


def test_without_a_limit_any_number_of_attempts_fits() -> None:
    assert AgenticConfig(attempts=1000).episode_timeout_s is None


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


@pytest.mark.parametrize("value", [None, ["a"], {"a": 1}])
def test_a_variable_that_is_no_text_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"agentic.agent_env.A must be a text, a number, .*; correct it"):
        AsyncPipelineConfig.of({"agentic.agent": "true", "agentic.agent_env": {"A": value}})


def test_arguments_of_an_environment_have_another_knob() -> None:
    with pytest.raises(
        ConfigError, match=r"must be the name of .* with size; set .*environment_kwargs\.NAME$"
    ):
        AsyncPipelineConfig.of({"agentic.environment": {"size": 4}})


def test_rewards_of_turns_of_an_agent_require_one_conversation() -> None:
    values = {"agentic.turn_rewards": True, "agentic.agent": "m:f"}
    with pytest.raises(ConfigError, match=r"turn_rewards requires .*max_chains=1 .*, got 16; set it to 1"):
        AsyncPipelineConfig.of(values)
    assert AsyncPipelineConfig.of({**values, "agentic.gateway.max_chains": 1}).agentic.turn_rewards
    assert AsyncPipelineConfig.of({"agentic.turn_rewards": True, "agentic.environment": "m:C"})


def test_conversations_follow_the_turns_unless_they_are_set() -> None:
    values = {"agentic.agent": "m:f", "agentic.max_turns": 40}
    assert AsyncPipelineConfig.of(values).agentic.max_chains == 40
    assert AsyncPipelineConfig.of({**values, "agentic.gateway.max_chains": 3}).agentic.max_chains == 3


def test_only_agents_begin_other_conversations() -> None:
    values = {"agentic.ends.chains": "score"}
    assert AsyncPipelineConfig.of({**values, "agentic.agent": "m:f"}).agentic.ends.chains == "score"
    with pytest.raises(ConfigError, match=r"ends.chains=score requires .*agentic.agent, .*; remove it"):
        AsyncPipelineConfig.of({**values, "agentic.environment": "m:C"})


def test_redundancy_refuses_that_failures_fill_the_groups() -> None:
    values = {"agentic.redundancy": 2, "agentic.environment": "m:C"}
    assert AsyncPipelineConfig.of(values).agentic.redundancy == 2
    with pytest.raises(ConfigError, match="redundancy=2 requires .*ends.env_failed=again or drop, got score"):
        AsyncPipelineConfig.of({**values, "agentic.ends.env_failed": "score"})


def test_the_path_of_a_unix_socket_is_limited() -> None:
    knob = "agentic.gateway.unix_dir"
    values = {"agentic.agent": "m:f", knob: "/tmp/" + "a" * (MAX_UNIX_DIR - 5)}
    assert AsyncPipelineConfig.of(values).agentic.gateway.unix_dir == values[knob]
    with pytest.raises(ConfigError, match=r"unix_dir must have at most 80 bytes .*; name a shorter one"):
        AsyncPipelineConfig.of({**values, knob: values[knob] + "a"})


def test_the_host_of_the_gateway_is_an_address() -> None:
    values = {"agentic.agent": "m:f", "agentic.gateway.host": "0.0.0.0"}
    assert AsyncPipelineConfig.of(values).agentic.gateway.host == "0.0.0.0"
    with pytest.raises(ConfigError, match=r"gateway.host must be an address of this host, .* got 'node1'"):
        AsyncPipelineConfig.of({**values, "agentic.gateway.host": "node1"})


def test_knobs_of_a_section_are_named_one_by_one() -> None:
    with pytest.raises(ConfigError) as caught:
        AsyncPipelineConfig.of({"agentic.gateway.max_chains": 1, "agentic.environment": "m:C"})
    path = AgenticConfig.PATH
    assert str(caught.value) == f"{path}.gateway.max_chains=1 requires {path}.agent; set it"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (
            {"agent": "m:f", "agent_env": {"A": "b"}},
            "agent_env requires a command as the agent, or verify, got",
        ),
        (
            {"agent": "m:f", "sandbox": "on"},
            "sandbox=on requires a command as the agent, or verify, got agent='m:f', which runs elsewhere",
        ),
        (
            {"agent": "true", "agent_env": {"OPENAI_API_KEY": "abc"}},
            "agent_env.OPENAI_API_KEY must not be set, because the run sets it",
        ),
        ({"agent": "true", "ends.invalid": "score"}, "ends.invalid=score requires .*agentic.environment"),
        ({"agent": "true", "gateway.lease_s": 0.001}, "gateway.lease_s must be >= 1"),
    ],
)
def test_a_knob_that_has_no_effect_with_this_agent(values: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=rf"agentic.{why}"):
        AsyncPipelineConfig.of({f"agentic.{name}": value for name, value in values.items()})


def test_verify_may_use_any_model() -> None:
    values = {"agentic.agent": "m:f", "agentic.agent_env": {"OPENAI_API_KEY": "abc"}}
    assert AsyncPipelineConfig.of({**values, "agentic.verify": "true"}).agentic.variables()
