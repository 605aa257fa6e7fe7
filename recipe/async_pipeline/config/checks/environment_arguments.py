# SPDX-License-Identifier: Apache-2.0
"""Check the environment of episodes and its arguments before a run starts: each episode would fail at them.

A custom class is read in its source, since importing it may need what only the workers have. Environments of
this package and of gymnasium itself are made once.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import warnings
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from ...agents.environment import BUILT_IN, GYMNASIUM, OPEN_ENV, EnvironmentSpec, is_url
from ...errors import ConfigError
from ..knobs.agentic import AgenticConfig
from ..paths import hint
from .user_classes import MethodCall, check_methods, find_class

NAME, ARGUMENTS = f"{AgenticConfig.PATH}.environment", f"{AgenticConfig.PATH}.environment_kwargs"
OWN_IDS = "gymnasium."
"""Modules of the environments that gymnasium brings along, which start no programs."""
METHODS = (
    MethodCall("reset", 1, "the seed", by_name=True),
    MethodCall("step", 1, "the text of the policy"),
    MethodCall("close", 0),
)
"""How an environment is called; `reset` also gets the row's task, by name."""


class Arguments(NamedTuple):
    """What can be passed to an environment by name."""

    names: tuple[str, ...]
    required: tuple[str, ...] = ()
    others: bool = False
    """It takes any other name too."""


def check_environment(knobs: AgenticConfig) -> None:
    """Raises ConfigError if there is no such environment, or if its arguments do not fit."""
    if knobs.environment is None:
        return
    name, given = knobs.environment, dict(knobs.environment_kwargs or {})
    if is_url(name):
        _check_server(name, given)
        return
    if name not in BUILT_IN and ":" in name:
        found = find_class(name, NAME, derived=False)
        if found is not None:
            check_methods(found, METHODS, f"{NAME}={name!r}")
            _check_names(name, given, arguments_in_source(found))
        return

    if find_spec("gymnasium") is None:
        raise ConfigError(f"{NAME}={name!r} requires gymnasium; pip install async_pipeline[agentic]")
    known = built_in_arguments(name)
    if name not in BUILT_IN:
        entry_point = _entry_point(name)
        if not entry_point.startswith(OWN_IDS):
            return
        known = (*known, *_of_gymnasium(name, entry_point))
    _check_names(name, given, Arguments(tuple(dict.fromkeys(known))))
    try:
        # gymnasium warns of an id without its version, which the processes of the environments repeat.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            EnvironmentSpec(name=name, kwargs=given).make().close()
    except Exception as error:  # noqa: BLE001 - an environment may raise anything
        shown = f" and {ARGUMENTS}={given!r}" if given else ""
        raise ConfigError(
            f"{NAME} must be an environment that can be made, got {name!r}{shown}, which cannot ("
            f"{_reason(error)}); correct them"
        ) from None


def _reason(error: Exception) -> str:
    """Return what an error says, in one line; errors of this package speak for themselves."""
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split()).rstrip(".")


def _check_server(name: str, given: Mapping[str, Any]) -> None:
    """Check the adapter's arguments. Only the workers can connect to the server, perhaps."""
    if find_spec("websockets") is None:
        raise ConfigError(f"{NAME}={name!r} requires websockets; pip install async_pipeline[agentic]")
    module, _, cls = OPEN_ENV.partition(":")
    adapter = getattr(importlib.import_module(module), cls)
    names = tuple(name for name in _named(adapter) if name != "url")
    _check_names("an environment of OpenEnv", given, Arguments(names, ("action", "observation")))
    try:
        adapter(name, **given)
    except ConfigError as error:
        raise ConfigError(f"{NAME}={name!r} with {ARGUMENTS}={given!r}: {error}") from None


def built_in_arguments(name: str) -> tuple[str, ...]:
    """Return the arguments that this package's class for an environment has itself."""
    module, _, cls = BUILT_IN.get(name, GYMNASIUM).partition(":")
    return tuple(_named(getattr(importlib.import_module(module), cls)))


def arguments_in_source(cls: ast.ClassDef) -> Arguments | None:
    """Return the arguments of a class, or None if its source does not show them."""
    made = [
        node
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__new__")
    ]
    if cls.decorator_list or cls.keywords or any(node.decorator_list for node in made) or len(made) > 1:
        return None
    if not made:
        return None if cls.bases else Arguments(())
    args = made[0].args
    places = args.args if args.posonlyargs else args.args[1:]  # without self
    optional = len(args.defaults)
    required = [one.arg for one in places[: max(0, len(places) - optional)]]
    required += [
        one.arg for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None
    ]
    names = [one.arg for one in (*places, *args.kwonlyargs)]
    return Arguments(tuple(names), tuple(required), args.kwarg is not None)


def _check_names(name: str, given: Mapping[str, Any], known: Arguments | None) -> None:
    if known is None:
        return
    for one, value in given.items():
        if one not in known.names and not known.others:
            has = f"it has {', '.join(known.names)}" if known.names else "it has none"
            raise ConfigError(
                f"{ARGUMENTS}.{one} must be an argument of {name}, got {value!r}"
                f"{hint(one, known.names)}; {has}; correct it, or remove the arguments of the configuration "
                f"by {ARGUMENTS}=null"
            )
    for one in known.required:
        if one not in given:
            raise ConfigError(f"{ARGUMENTS}.{one} must be set, because {name} requires it, got none; set it")


def _entry_point(name: str) -> str:
    """Return `module:Class` of an id of gymnasium. Raises ConfigError if there is no such id."""
    import gymnasium

    # `make` also takes an id without its version, and chooses the newest.
    found = [one for one in gymnasium.registry if name in (one, one.rpartition("-v")[0])]
    if not found:
        raise ConfigError(
            f"{NAME} must be {', '.join(BUILT_IN)}, module:Class, http://HOST:PORT or ws://HOST:PORT of a "
            f"server of OpenEnv, or an id of gymnasium, got {name!r}"
            f"{hint(name, [*BUILT_IN, *gymnasium.registry])}; correct it"
        )
    return str(gymnasium.registry[found[-1]].entry_point)


def _of_gymnasium(name: str, entry_point: str) -> Iterator[str]:
    """Yield the arguments that gymnasium passes on to one of its environments."""
    yield "max_episode_steps"
    module, _, cls = entry_point.partition(":")
    try:
        yield from _named(getattr(importlib.import_module(module), cls))
    except Exception as error:  # noqa: BLE001 - gymnasium raises no ImportError for missing packages
        raise ConfigError(
            f"{NAME}={name!r} requires {entry_point}, which cannot be imported ({_reason(error)}); install "
            "what it requires"
        ) from None


def _named(cls: type) -> Iterator[str]:
    """Yield the names that the constructors of a class take, as long as they pass others on."""
    for one in cls.__mro__:
        if "__init__" not in vars(one):
            continue
        parameters = inspect.signature(one.__init__).parameters.values()  # type: ignore[misc]
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                if parameter.name not in ("self", "id"):
                    yield parameter.name
        if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters):
            return
