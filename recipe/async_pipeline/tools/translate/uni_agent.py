# SPDX-License-Identifier: Apache-2.0
"""uni-agent's keys. Its files are verl's config with a section for its framework and gateway."""

from __future__ import annotations

from ...config.agentic import AgenticConfig
from .rllm import ALSO, VERLS
from .rules import Document, Table, TranslatedFile, as_it_is, by_hand, nothing, to, translate

_AGENTIC = f"+{AgenticConfig.PATH}"
_FRAMEWORK = "actor_rollout_ref.rollout.custom.agent_framework"


def translate_uni_agent(document: Document) -> TranslatedFile:
    """Translate a file. Raises ConfigError if two keys disagree."""
    return translate(document, TABLE, also=ALSO)


TABLE: Table = (
    (
        f"{_FRAMEWORK}.agent_runners.*.runner_fqn",
        by_hand("a runner is an agent behind the gateway: see docs/agents.md for how a function becomes one"),
    ),
    (
        f"{_FRAMEWORK}.agent_runners.*.max_concurrent_sessions",
        to(f"{_AGENTIC}.concurrency", text="of each agent loop worker"),
    ),
    (f"{_FRAMEWORK}.*", by_hand("an option of uni-agent's framework, which this package replaces")),
    (
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
        nothing("left out: this package's manager starts the agents and keeps their tokens and versions"),
    ),
    *((f"{section}.*", as_it_is) for section in VERLS),
)
