# SPDX-License-Identifier: Apache-2.0
"""Describe what the knobs of `agentic` mean for a run, for `async-pipeline explain`."""

from __future__ import annotations

from collections.abc import Iterator

from ..agents.runners import is_function
from .agentic import EXTERNAL, AgenticConfig


def episodes_in_words(knobs: AgenticConfig) -> Iterator[str]:
    """Yield lines about the episodes of a run; none without environments and agents."""
    if knobs.environment is not None:
        kwargs = ", ".join(f"{name}={value}" for name, value in (knobs.environment_kwargs or {}).items())
        yield f"environment {knobs.environment}({kwargs}), isolation {knobs.isolation}"
    if knobs.agent is not None:
        yield f"agent {knobs.agent} ({_kind(knobs.agent)}), over HTTP"
        yield f"its reward: {_reward(knobs)}"
        if knobs.gateway.agent_may_reward and knobs.verify is None:
            yield "the agent has its control key: everything that it runs can set its reward"
    if knobs.environment is None and knobs.agent is None:
        return

    limits = [("a turn", knobs.turn_timeout_s), ("an episode", knobs.episode_timeout_s)]
    if knobs.environment is not None:
        limits.append(("a reset or step", knobs.env_timeout_s))
    named = ", ".join(f"{what} {'none' if limit is None else f'{limit:g} s'}" for what, limit in limits)
    at_once = f"{knobs.concurrency} at once in each agent loop worker"
    yield f"at most {knobs.max_turns} turns; {at_once}; deadline of {named}"
    yield f"one that fails is played {knobs.attempts} times at most, with its seed and without its group"


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
