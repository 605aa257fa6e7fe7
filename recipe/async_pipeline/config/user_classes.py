# SPDX-License-Identifier: Apache-2.0
"""Find the user's classes, written `module:Class`: in their source, and strategies also by an import."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from ..core.schedule import Schedule
from ..errors import ConfigError
from ..strategies import STRATEGIES, schedule_class
from .paths import hint


def schedule_at(strategy: str, path: str) -> type[Schedule]:
    """Return the schedule of a strategy of the table or of `module:Class`, which is imported.

    `path` is the config key or the option, for errors. Raises ConfigError if there is no such class, if its
    module cannot be imported, or if it is no strategy.
    """
    if strategy in STRATEGIES:
        return STRATEGIES[strategy]
    find_class(strategy, path)
    try:
        return schedule_class(strategy)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except Exception as error:  # noqa: BLE001 - importing the user's module may raise anything
        raise ConfigError(
            f"{path} names {strategy!r}, whose module cannot be imported ({type(error).__name__}: {error}); "
            "correct it"
        ) from None


def find_class(target: str, path: str, *, derived: bool = True) -> ast.ClassDef | None:
    """Return the definition that `target` names, or None if the source does not contain it.

    A class that the module imports, for example, is not in its source. `path` is the config key, for errors;
    `derived`: the class must have a base class. Raises ConfigError if there is no such module, or no such
    class in it.
    """
    module, _, name = target.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise ConfigError(f"{path} must read module:Class, got {target!r}; e.g. my_package.my_module:MyClass")
    found = find_module(target, path)
    if found.origin is None or not found.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(found.origin).read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{path} names module {module!r}, which is not valid Python ({error}), got {target!r}; correct it"
        ) from None
    return _defined(name, tree, f"{path} names {target!r}", derived)


def find_module(target: str, path: str) -> ModuleSpec:
    """Return where the module of `module:name` is. It is not imported, but the packages that it is in are.

    `path` is the config key, for errors. Raises ConfigError if there is no such module.
    """
    module = target.partition(":")[0]
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    except Exception as error:  # noqa: BLE001 - importing the parent packages may raise anything
        raise ConfigError(
            f"{path} names module {module!r}, whose package cannot be imported ({type(error).__name__}: "
            f"{error}), got {target!r}; correct it"
        ) from None

    if found is None:
        raise ConfigError(
            f"{path} names module {module!r}, which cannot be found, got {target!r}; check PYTHONPATH"
        )
    return found


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


def _defined(name: str, tree: ast.Module, what: str, derived: bool) -> ast.ClassDef | None:
    """Return a class of a module, or None if other statements may define it. Raises ConfigError otherwise."""
    open_ended, there = False, []
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef):
            there.append(node.name)
            if node.name == name:
                if derived and not node.bases:
                    raise ConfigError(
                        f"{what}, which has no base class; subclass Schedule for a strategy, "
                        "RoleStateMachine for a stage"
                    )
                return node

        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name:
                raise ConfigError(f"{what}, which is a function; name a class")
            open_ended |= node.name == "__getattr__"

        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
            there += names
            open_ended |= name in names or "*" in names

        elif not (isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)):
            open_ended |= any(
                isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Store)
                for part in ast.walk(node)
            )

    if open_ended:
        return None
    raise ConfigError(f"{what}, which the module does not define{hint(name, there)}; correct the name")


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, including those in its branches."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements(
                [*node.body, *getattr(node, "orelse", ()), *getattr(node, "finalbody", ())]
            )
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)
