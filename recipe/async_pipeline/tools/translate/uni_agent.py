# SPDX-License-Identifier: Apache-2.0
"""uni-agent's keys. Its files are verl's config with a section for its framework and gateway."""

from __future__ import annotations

from collections.abc import Collection

from ...config.keys.foreign_keys import Document, nothing, to
from ...config.knobs.agentic import AgenticConfig
from .rules import Table, TranslatedFile, by_hand, translate
from .verls_keys import SWITCH, VERLS, with_agent

_AGENTIC = f"+{AgenticConfig.PATH}"


def translate_uni_agent(document: Document, variables: Collection[str] = ()) -> TranslatedFile:
    """Translate a document. `variables`: paths that it refers to itself."""
    found = translate(document, TABLE, also=SWITCH, variables=variables)
    return with_agent(found)


TABLE: Table = (
    (
        "actor_rollout_ref.rollout.custom.agent_framework.agent_runners.*.runner_fqn",
        by_hand("a runner is an agent behind the gateway: see docs/agents.md for how a function becomes one"),
    ),
    (
        "actor_rollout_ref.rollout.custom.agent_framework.agent_runners.*.max_concurrent_sessions",
        to(f"{_AGENTIC}.concurrency", text="of each agent loop worker"),
    ),
    (
        "actor_rollout_ref.rollout.custom.agent_framework.*",
        by_hand("an option of uni-agent's framework, which this package replaces"),
    ),
    (
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
        nothing("left out: this package's manager starts the agents and keeps their tokens and versions"),
    ),
    *VERLS,
)
