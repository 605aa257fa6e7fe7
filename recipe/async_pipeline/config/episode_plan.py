# SPDX-License-Identifier: Apache-2.0
"""Describe what the knobs of `agentic` mean for a run, for `async-pipeline explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..agents.runners import is_function
from .agentic import AGENT_LOOP, EXTERNAL, VERLS_AGENT_LOOP, AgenticConfig
from .paths import select

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
TOOL_AGENT = "tool_agent"
"""verl's agent loop that calls tools."""


def episodes_in_words(knobs: AgenticConfig, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about the episodes of a run; none if all are single responses.

    `config`: the whole config, for the agent loops of verl's keys.
    """
    verls = str(select(config, AGENT_LOOP) or VERLS_AGENT_LOOP)
    plays_verls = knobs.environment is None and knobs.agent is None
    if plays_verls and verls == VERLS_AGENT_LOOP:
        return
    if knobs.environment is not None:
        kwargs = ", ".join(f"{name}={value}" for name, value in (knobs.environment_kwargs or {}).items())
        yield f"environment {knobs.environment}({kwargs}), isolation {knobs.isolation}"
    if knobs.agent is not None:
        yield f"agent {knobs.agent} ({_kind(knobs.agent)}), over HTTP"
        yield f"its reward: {_reward(knobs)}"
        if knobs.gateway.agent_may_reward and knobs.verify is None:
            yield "the agent has its control key: everything that it runs can set its reward"
    if plays_verls:
        yield f"agent loop {verls}{_tools(config) if verls == TOOL_AGENT else ''}"

    limits = [("a turn", knobs.turn_timeout_s), ("an episode", knobs.episode_timeout_s)]
    if knobs.environment is not None:
        limits.append(("a reset or step", knobs.env_timeout_s))
    if knobs.tool_timeout_s is not None or verls == TOOL_AGENT:
        limits.append(("a tool call", knobs.tool_timeout_s))
    named = ", ".join(f"{what} {'none' if limit is None else f'{limit:g} s'}" for what, limit in limits)
    if plays_verls:
        most = select(config, f"{MULTI_TURN}.max_assistant_turns") if verls == TOOL_AGENT else None
        yield f"{'' if most is None else f'at most {most} turns; '}deadline of {named}"
    else:
        at_once = f"{knobs.concurrency} at once in each agent loop worker"
        yield f"at most {knobs.max_turns} turns; {at_once}; deadline of {named}"
    yield f"one that fails is played {knobs.attempts} times at most, with its seed and without its group"


def _tools(config: Mapping[str, Any]) -> str:
    files = [select(config, f"{MULTI_TURN}.{name}") for name in ("function_tool_path", "tool_config_path")]
    named = " and ".join(str(file) for file in files if file) or "no file"
    return f" with the tools of {named}, called in the format {select(config, f'{MULTI_TURN}.format')}"


def _kind(agent: str) -> str:
    if agent == EXTERNAL:
        return "programs outside of the run that claim tasks"
    return "a function" if is_function(agent) else "a command for each episode"


def _reward(knobs: AgenticConfig) -> str:
    if knobs.verify is not None:
        return f"what {knobs.verify} prints"
    own = "what the agent gives, or else the reward function's"
    if knobs.agent == EXTERNAL or is_function(knobs.agent or ""):
        return own
    return (
        f"{own}; an agent that runs what the model writes needs verify, because the model can print one too"
    )
