# SPDX-License-Identifier: Apache-2.0
"""The order in which a strategy trains groups, also of a user's class, which is read and not imported."""

from __future__ import annotations

import ast

from ...config.checks.user_classes import find_class
from ...config.paths import OWN
from ...core.schedule import Schedule
from ...strategies import STRATEGIES

ORDER_OF_BASE = {"Schedule": Schedule.order} | {cls.__name__: cls.order for cls in STRATEGIES.values()}
"""The order that a custom strategy inherits, by the name of its base class."""


def order_of(strategy: str) -> str:
    """Return in words how a strategy orders groups. Raises ConfigError if there is no such class."""
    if strategy in STRATEGIES:
        order: str = STRATEGIES[strategy].order
    else:
        cls = find_class(strategy, f"{OWN}.strategy")
        inherited = (ORDER_OF_BASE[base] for base in base_names(cls) if base in ORDER_OF_BASE)
        order = class_constant(cls, "order") or next(inherited, "")
    return {"finished": "in the order they finish", "drawn": "in the order they were drawn"}.get(
        order, "in a custom order"
    )


def class_constant(cls: ast.ClassDef | None, name: str) -> str | None:
    """Return the literal text that a class body assigns to a name, or None."""
    for node in cls.body if cls else ():
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        value = getattr(node, "value", None)
        if (
            any(isinstance(t, ast.Name) and t.id == name for t in targets)
            and isinstance(value, ast.Constant)
            and isinstance(value.value, str)
        ):
            return value.value
    return None


def base_names(cls: ast.ClassDef | None) -> list[str]:
    """Return the base classes that a definition names, without their modules."""
    bases = cls.bases if cls else []
    return [
        base.attr if isinstance(base, ast.Attribute) else base.id
        for base in bases
        if isinstance(base, ast.Attribute | ast.Name)
    ]
