# SPDX-License-Identifier: Apache-2.0
"""Which stages a pipeline has, custom ones included, and which stage consumes the items of which."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence

from ..errors import ConfigError
from .stage import ROLES, RoleStateMachine

GRAPH: Mapping[str, tuple[str, ...]] = {
    "dataloader": ("generate",),
    "generate": ("teacher",),
    "teacher": ("rollout",),
    "rollout": ("logp", "ref_logp", "values"),
    "logp": ("reward",),
    "ref_logp": ("reward",),
    "values": ("reward",),
    "reward": ("train", "critic"),
    "critic": ("train",),
    "train": ("param_update",),
    "param_update": (),
}
"""The consumers of each stage. A stage that a run does not need is left out with its edges; `reward` then
follows the last stage before it that the run has, and so does `rollout`.
"""

OPTIONAL = ("teacher", "logp", "ref_logp", "values", "critic")
"""Stages that a run may leave out."""


def role_class(name: str) -> type[RoleStateMachine]:
    """Return the class of a stage. Raises ConfigError if none is registered under the name."""
    if name not in ROLES:
        raise ConfigError(f"no stage is called {name!r}; registered: {', '.join(sorted(ROLES))}")
    return ROLES[name]


def graph_of(roles: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the graph of these stages only.

    Raises ConfigError if a stage is unknown or a required one is missing.
    """
    wanted = set(roles)
    unknown = wanted - GRAPH.keys()
    if unknown:
        raise ConfigError(f"unknown stages {sorted(unknown)}; the pipeline has {', '.join(GRAPH)}")
    missing = GRAPH.keys() - wanted - set(OPTIONAL)
    if missing:
        raise ConfigError(f"stages {sorted(missing)} cannot be left out; only {', '.join(OPTIONAL)} can")
    if ("values" in wanted) != ("critic" in wanted):
        raise ConfigError("stages values and critic belong together; name both or neither")
    graph = {a: tuple(b for b in bs if b in wanted) for a, bs in GRAPH.items() if a in wanted}
    instead = {"generate": ("rollout",), "rollout": ("reward",)}
    return {role: consumers or instead.get(role, ()) for role, consumers in graph.items()}


def insert_role(graph: dict[str, tuple[str, ...]], role_name: str, *, after: str, before: str) -> None:
    """Insert a registered stage into the edge `after` -> `before` of a graph.

    Raises ConfigError if the stage or the edge does not exist, or the stage is in the graph already.
    """
    if role_name not in ROLES:
        raise ConfigError(
            f"no stage is called {role_name!r}; decorate its class with @register_role({role_name!r})"
        )
    if role_name in graph:
        raise ConfigError(f"stage {role_name!r} is in the pipeline already")
    if before not in graph.get(after, ()):
        edges = ", ".join(f"{a}->{b}" for a, bs in graph.items() for b in bs)
        raise ConfigError(f"there is no edge {after}->{before} to insert {role_name!r} on; edges: {edges}")
    graph[after] = tuple(role_name if b == before else b for b in graph[after])
    graph[role_name] = (before,)


# Custom stages, named in the config as `module:Class@after->before`.
def insert_custom_stages(graph: dict[str, tuple[str, ...]], specs: Sequence[str]) -> None:
    """Import each stage and insert it into the graph, in order.

    Raises ConfigError if a stage is not found or does not fit into the graph.
    """
    for spec in specs:
        target, _, edge = spec.partition("@")
        after, _, before = edge.partition("->")
        insert_role(graph, load_role(target).role, after=after.strip(), before=before.strip())


def load_role(target: str) -> type[RoleStateMachine]:
    """Return the class at `module:Class`. Raises ConfigError if it is not importable or not registered."""
    module, _, name = target.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"custom stage {target} cannot be imported ({error}); write module:Class"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, RoleStateMachine) and hasattr(cls, "role")):
        raise ConfigError(f"custom stage {target} must be a RoleStateMachine decorated with @register_role")
    return cls
