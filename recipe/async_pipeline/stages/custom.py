# SPDX-License-Identifier: Apache-2.0
"""Custom stages, named in the config as `module:Class@after->before`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from ..core.graph import insert_role
from ..core.stage import RoleStateMachine
from ..errors import ConfigError


def insert_custom_stages(graph: dict[str, tuple[str, ...]], specs: Sequence[str]) -> None:
    """Import each stage and insert it into the graph, in order.

    Raises ConfigError if a stage is not found or does not fit into the graph.
    """
    for spec in specs:
        target, _, edge = spec.partition("@")
        after, _, before = edge.partition("->")
        insert_role(graph, load_role(target).role, after=after.strip(), before=before.strip())


def load_role(target: str) -> type[RoleStateMachine]:
    """Return the class at `module:Class`. Raises ConfigError if it cannot be imported or is not
    registered.
    """
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
