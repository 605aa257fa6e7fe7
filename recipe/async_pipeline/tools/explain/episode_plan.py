# SPDX-License-Identifier: Apache-2.0
"""Describe what the knobs of `agentic` mean for a run, for `async-pipeline explain`."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from typing import Any

from ...agents.episodes import FAILED_EPISODE, POLICIES
from ...agents.runners import is_function
from ...config.knobs.agentic import AGENT_LOOP, EXTERNAL, VERLS_AGENT_LOOP, AgenticConfig
from ...config.paths import select

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
TOOL_AGENT = "tool_agent"
"""verl's agent loop that calls tools."""
SANDBOXES = {
    "auto": "its commands run in a sandbox on hosts that permit one, as doctor says (sandbox=auto)",
    "on": "its commands run in a sandbox (sandbox=on)",
    "offline": "its commands run in a sandbox, and reach the gateway only (sandbox=offline)",
    "off": "its commands can read the files and processes of the run (sandbox=off)",
}
OF_ALL_LOOPS = ("agent_failed", "deadline")
"""The ends that each agent loop knows."""


def describe_episodes(
    knobs: AgenticConfig, config: Mapping[str, Any], reuse_prefixes: bool | str = False
) -> Iterator[str]:
    """Yield lines about the episodes of a run; none if all are single responses.

    `config`: the whole config, for the agent loops of verl's keys. `reuse_prefixes`: of `weight_sync`.
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
        if knobs.has_commands:
            yield SANDBOXES[knobs.sandbox]
        if not ipaddress.ip_address(knobs.gateway.host).is_loopback:
            yield (
                f"its gateway listens on {knobs.gateway.host}, unencrypted: other hosts reach it, with the "
                "key of an episode"
            )
        if knobs.gateway.agent_may_reward and knobs.verify is None:
            yield "the agent has its control key: everything that it runs can set its reward"
    if plays_verls:
        yield f"agent loop {verls}{_tools(config) if verls == TOOL_AGENT else ''}"

    yield _limits(knobs, config, verls)
    if knobs.turn_rewards:
        yield "each reward is at the last token of its turn (turn_rewards)"
    if reuse_prefixes == "session":
        yield "after an update, later turns use the keys and values of their episode (reuse_prefixes=session)"
    yield from _ends(knobs)


def _limits(knobs: AgenticConfig, config: Mapping[str, Any], verls: str) -> str:
    """Return the limits of the episodes; `verls` is the agent loop that verl's key names."""
    plays_verls = knobs.environment is None and knobs.agent is None
    limits = [("an episode", knobs.episode_timeout_s)]
    if knobs.environment is not None:
        limits.append(("a reset or step", knobs.env_timeout_s))
    if knobs.tool_timeout_s is not None or verls == TOOL_AGENT:
        limits.append(("a tool call", knobs.tool_timeout_s))
    named = ", ".join(f"{what} {'none' if limit is None else f'{limit:g} s'}" for what, limit in limits)
    if plays_verls:
        most = select(config, f"{MULTI_TURN}.max_assistant_turns") if verls == TOOL_AGENT else None
        return f"{'' if most is None else f'at most {most} turns; '}deadline of {named}"
    at_once = f"{knobs.concurrency} at once in each agent loop worker"
    return f"at most {knobs.max_turns} turns; {at_once}; deadline of {named}"


def _ends(knobs: AgenticConfig) -> Iterator[str]:
    """Yield what happens to episodes that did not reach their own end."""
    policies = {name: getattr(knobs.ends, name) for name in _known_ends(knobs)}
    failures = [name for name in policies if "again" in POLICIES[name]]
    # `score` is as `again` as long as the policy has written nothing.
    repeated = [name for name in failures if knobs.attempts > 1 and policies[name] != "drop"]
    if repeated:
        which = "fails" if repeated == failures else f"ends as {' or '.join(repeated)}"
        yield (
            f"one that {which} is played {knobs.attempts} times at most, with its seed and without its group"
        )
    if repeated != failures:
        others = " or ".join(name for name in failures if name not in repeated)
        which = f"ends as {others}" if repeated else "fails"
        yield f"one that {which} is not repeated: its group is bad data ({FAILED_EPISODE})"

    changed = [f"{name}={policy}" for name, policy in policies.items() if policy != POLICIES[name][0]]
    if changed:
        score = f" (score: {knobs.failure_reward:g})" if "score" in policies.values() else ""
        yield f"ends that differ from the defaults: {', '.join(changed)}{score}"


def _known_ends(knobs: AgenticConfig) -> tuple[str, ...]:
    """Return the ends that the agent loop of a config knows; see `EndPolicies`."""
    if knobs.environment is not None:
        return tuple(name for name in POLICIES if name != "chains" or knobs.agent is not None)
    if knobs.agent is None:
        return OF_ALL_LOOPS
    without = {"invalid"} if knobs.verify is not None else {"invalid", "env_failed"}
    return tuple(name for name in POLICIES if name not in without)


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
