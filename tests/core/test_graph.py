# SPDX-License-Identifier: Apache-2.0
"""The stages of a run: which may be left out, and where another may be inserted."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.core.graph import GRAPH, OPTIONAL, graph_of, insert_role, role_class
from recipe.async_pipeline.errors import ConfigError

REQUIRED = [role for role in GRAPH if role not in OPTIONAL]


def test_a_stage_that_is_left_out_takes_its_edges_with_it() -> None:
    graph = graph_of(REQUIRED)
    assert list(graph) == REQUIRED
    assert graph["rollout"] == ("reward",) and graph["reward"] == ("train",)
    assert graph_of([*REQUIRED, "ref_logp"])["rollout"] == ("ref_logp",)
    assert graph_of(GRAPH) == GRAPH


@pytest.mark.parametrize("missing", REQUIRED)
def test_a_required_stage_may_not_be_left_out(missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        graph_of(role for role in REQUIRED if role != missing)


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown stages.*other"):
        graph_of([*REQUIRED, "other"])
    with pytest.raises(ConfigError, match="no stage is called 'other'"):
        role_class("other")


@pytest.mark.parametrize("one", ["values", "critic"])
def test_values_and_critic_belong_together(one: str) -> None:
    with pytest.raises(ConfigError, match="belong together"):
        graph_of([*REQUIRED, one])


def test_a_stage_is_inserted_on_an_edge_that_exists() -> None:
    graph = graph_of(REQUIRED)
    with pytest.raises(ConfigError, match="no edge train->logp"):
        insert_role(graph, "values", after="train", before="logp")
    with pytest.raises(ConfigError, match="no stage is called 'other'"):
        insert_role(graph, "other", after="reward", before="train")
    insert_role(graph, "values", after="reward", before="train")
    assert graph["reward"] == ("values",) and graph["values"] == ("train",)
    with pytest.raises(ConfigError, match="in the pipeline already"):
        insert_role(graph, "values", after="rollout", before="logp")
