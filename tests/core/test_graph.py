# SPDX-License-Identifier: Apache-2.0
"""The stages of a run: which may be left out, and where another may be inserted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from recipe.async_pipeline import AsyncTrainingFlow, RoleStateMachine, register_role
from recipe.async_pipeline.core.graph import (
    GRAPH,
    OPTIONAL,
    graph_of,
    insert_custom_stages,
    insert_role,
    load_role,
    role_class,
)
from recipe.async_pipeline.core.stage import ROLES
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import ConfigError
from tests.fakes.trainer import SimTrainer

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


SEEN: list[str] = []


class Passes(RoleStateMachine):
    """Not registered: it has no name."""

    async def process(self, item: Any) -> None:
        SEEN.append(f"{self.role}:{item.step}")
        await self.emit(item)


@pytest.fixture(autouse=True)
def custom_stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module `custom_stages` with two roles, and things that are none."""
    module = ModuleType("custom_stages")
    for name in ("first", "second"):
        setattr(
            module,
            name.title(),
            register_role(name)(type(name.title(), (Passes,), {"__module__": "custom_stages"})),
        )
    module.Nameless, module.number = Passes, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "custom_stages", module)
    SEEN.clear()
    yield
    for name in ("first", "second"):
        del ROLES[name]


def test_roles_are_inserted_in_order_and_run() -> None:
    flow = AsyncTrainingFlow(SimTrainer(steps=2))
    insert_custom_stages(
        flow.graph, ["custom_stages:First@reward->train", "custom_stages:Second@first -> train"]
    )
    assert flow.graph["reward"] == ("first",)
    assert flow.graph["first"] == ("second",)
    assert flow.graph["second"] == ("train",)
    run_virtual(flow.run())
    assert SEEN == ["first:1", "second:1", "first:2", "second:2"]


def test_none_at_all() -> None:
    flow = AsyncTrainingFlow(SimTrainer())
    before = dict(flow.graph)
    insert_custom_stages(flow.graph, [])
    assert flow.graph == before


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_module:First", r"cannot be imported \(No module named 'no_such_module'\)"),
        ("custom_stages:Third", "cannot be imported"),
        ("custom_stages:number", "must be a RoleStateMachine decorated with @register_role"),
        ("custom_stages:Nameless", "must be a RoleStateMachine decorated with @register_role"),
        ("builtins:dict", "must be a RoleStateMachine"),
    ],
)
def test_what_is_no_role_is_named(target: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"custom stage {target} {reason}"):
        load_role(target)


def test_an_edge_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no edge train->reward"):
        insert_custom_stages(AsyncTrainingFlow(SimTrainer()).graph, ["custom_stages:First@train->reward"])
