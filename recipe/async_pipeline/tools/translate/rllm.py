# SPDX-License-Identifier: Apache-2.0
"""rLLM's keys. Its files are verl's config with a section `rllm`; verl's keys stay as they are."""

from __future__ import annotations

from typing import Any

from ...config.agentic import AgenticConfig
from ...config.foreign_keys import Document, Outcome, Rule, by_hand, nothing, to
from ...config.paths import select
from .rules import Table, TranslatedFile, as_it_is, translate

_AGENTIC = f"+{AgenticConfig.PATH}"
VERLS: Table = (
    ("actor_rollout_ref.*", as_it_is),
    ("algorithm.*", as_it_is),
    ("critic.*", as_it_is),
    ("data.*", as_it_is),
    ("reward.*", as_it_is),
    ("trainer.*", as_it_is),
)
"""Sections of verl."""
ALSO = {"+async_pipeline": True}
_ARGUMENT = by_hand("set agentic.environment_kwargs")
_GATEWAY = by_hand("see the gateway's keys below agentic in docs/configuration.md, if the agent needs one")


ENVIRONMENTS = {"frozenlake": "frozen_lake"}
"""rLLM's environments that this package has, by its own name of them."""


def _environment(value: Any, document: Document) -> Outcome:
    name = ENVIRONMENTS.get(value, value)
    text = "" if value in ENVIRONMENTS else "an id of gymnasium or module:Class"
    return Outcome("set", {f"{_AGENTIC}.environment": name}, text)


def _argument(name: str) -> Rule:
    def rule(value: Any, document: Document) -> Outcome:
        if select(document, "rllm.env.name") in ENVIRONMENTS:
            return Outcome("set", {f"{_AGENTIC}.environment_kwargs.{name}": value})
        return _ARGUMENT(value, document)

    return rule


def translate_rllm(document: Document) -> TranslatedFile:
    """Translate a file. Raises ConfigError if two keys disagree."""
    return translate(document, TABLE, also=ALSO)


TABLE: Table = (
    ("rllm.agent.max_steps", to(f"{_AGENTIC}.max_turns")),
    ("rllm.agent.trajectory_timeout", to(f"{_AGENTIC}.episode_timeout_s", as_=float)),
    ("rllm.agent.name", by_hand("name an agent loop, in rollout.agent.default_agent_loop or in the rows")),
    ("rllm.agent.*", by_hand("an argument of the agent: see docs/agents.md")),
    ("rllm.env.name", _environment),
    ("rllm.env.env_args.size", _argument("size")),
    ("rllm.env.env_args.p", _argument("frozen")),
    ("rllm.env.env_args.is_slippery", _argument("slippery")),
    ("rllm.env.env_args.*", _ARGUMENT),
    ("rllm.gateway.*", _GATEWAY),
    ("rllm.workflow.n_parallel_tasks", to(f"{_AGENTIC}.concurrency")),
    ("rllm.rejection_sample.enable", to("algorithm.filter_groups.enable")),
    ("rllm.stepwise_advantage.*", nothing("an episode is one response, of which every turn is trained")),
    ("rllm.mask_truncated_samples", by_hand("see agentic.ends.cut_off")),
    ("async_training.staleness_threshold", as_it_is),
    ("async_training.trigger_parameter_sync_step", as_it_is),
    ("async_training.partial_rollout", as_it_is),
    ("async_training.require_batches", as_it_is),
    *VERLS,
)
