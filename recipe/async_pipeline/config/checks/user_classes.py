# SPDX-License-Identifier: Apache-2.0
"""Find the user's classes and functions, `module:Class`, in their source; strategies also by import."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import UnionType
from typing import NamedTuple

from ...core.schedule import Schedule
from ...errors import ConfigError
from ...strategies import STRATEGIES, schedule_class
from ..paths import hint

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


class MethodCall(NamedTuple):
    """How a method is called."""

    name: str
    arguments: int
    """Without self."""
    passed: str = ""
    """What they are, for errors."""
    by_name: bool = False
    """Whether it may get any further arguments by name."""

    def fits(self, method: AnyFunction) -> bool:
        """Return whether the method can be called so."""
        return takes(method, 1 + self.arguments, others=self.by_name)


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
    tree = _tree(target, path)
    node = None if tree is None else _defined(name, tree, f"{path} names {target!r}", ast.ClassDef)
    if isinstance(node, AnyFunction):
        raise ConfigError(f"{path} names {target!r}, which is a function; name a class")
    if derived and node is not None and not node.bases:
        raise ConfigError(
            f"{path} names {target!r}, which has no base class; subclass Schedule for a strategy, "
            "RoleStateMachine for a stage"
        )
    return node


def check_function(target: str, path: str, arguments: int) -> None:
    """Raises ConfigError if there is no such function, or if it cannot be called with so many arguments.

    A function that its module imports, for example, is not in its source, and is not checked.
    """
    tree = _tree(target, path)
    name = target.partition(":")[2]
    node = None if tree is None else _defined(name, tree, f"{path} names {target!r}", AnyFunction)
    if isinstance(node, ast.ClassDef):
        raise ConfigError(f"{path} names {target!r}, which is a class; name a function")
    if node is None or node.decorator_list:
        return
    if not takes(node, arguments):
        raise ConfigError(
            f"{path} must name a function that can be called with {arguments} arguments, got {target!r}, "
            f"whose arguments are ({ast.unparse(node.args)}); change them"
        )


def takes(function: AnyFunction, arguments: int, *, others: bool = False) -> bool:
    """Return whether a function can be called with so many arguments by position.

    `others`: the call passes further ones by name, which the function may require.
    """
    args = function.args
    places = len(args.posonlyargs) + len(args.args)
    if arguments > places and args.vararg is None:
        return False
    return others or (arguments >= places - len(args.defaults) and None not in args.kw_defaults)


def check_methods(cls: ast.ClassDef, calls: Iterable[MethodCall], what: str) -> None:
    """Raises ConfigError if a class lacks a method, or if one cannot be called as it will be.

    `what`: the key with the class, for errors. Methods that the source does not show are not checked.
    """
    defined = {node.name: node for node in _statements(cls.body) if isinstance(node, AnyFunction)}
    others = {
        part.id
        for node in _statements(cls.body)
        if not isinstance(node, AnyFunction)
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }
    whole = not (cls.bases or cls.keywords or cls.decorator_list or "__getattr__" in defined)
    for call in calls:
        node = defined.get(call.name)
        if node is None and whole and call.name not in others:
            raise ConfigError(f"{what} must be a class with the method {call.name}, which it lacks; write it")
        if node is None or node.decorator_list or call.fits(node):
            continue
        passed = f"be called with {call.passed}" if call.passed else "be called without arguments"
        raise ConfigError(
            f"{what} must have a method {call.name} that can {passed}, but its arguments are "
            f"({ast.unparse(node.args)}); change them"
        )


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
            f"{path} names module {module!r}, which cannot be found, got {target!r}"
            f"{hint(module, _neighbours(module))}; check PYTHONPATH"
        )
    return found


def _neighbours(module: str) -> Iterator[str]:
    """Yield the modules that are where a module would be, if its package can be found."""
    package, dot, _ = module.rpartition(".")
    try:
        found = importlib.util.find_spec(package) if package else None
    except ModuleNotFoundError:
        found = None
    where = None if found is None else found.submodule_search_locations
    if package and where is None:
        return
    yield from (f"{package}{dot}{one.name}" for one in pkgutil.iter_modules(where))


def _tree(target: str, path: str) -> ast.Module | None:
    """Return the source of the module of `module:name`, or None without one. Raises ConfigError."""
    found = find_module(target, path)
    if found.origin is None or not found.origin.endswith(".py"):
        return None
    try:
        return ast.parse(Path(found.origin).read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{path} names module {target.partition(':')[0]!r}, which is not valid Python ({error}), got "
            f"{target!r}; correct it"
        ) from None


def _defined(
    name: str, tree: ast.Module, what: str, wanted: type[ast.ClassDef] | UnionType
) -> ast.ClassDef | AnyFunction | None:
    """Return a class or function of a module, or None if other statements may define it.

    `wanted`: what the name should be, for hints. Raises ConfigError if nothing defines it.
    """
    open_ended, there = False, []
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef | AnyFunction):
            if node.name == name:
                return node
            there += [node.name] if isinstance(node, wanted) else []
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
