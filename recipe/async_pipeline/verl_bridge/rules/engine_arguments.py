# SPDX-License-Identifier: Apache-2.0
"""Refuse arguments of a rollout engine that the installed engine does not have.

verl passes `rollout.engine_kwargs.<engine>` on as it is, so a misspelled name would fail in a server, minutes
after Ray has started. The names are read from the engine's source: importing an engine takes seconds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from ...config.checks.refusals import check_all
from ...config.paths import hint
from ...errors import ConfigError
from ...installed.engines import find_spec, plugins_of
from ...redaction import shown

ROLLOUT = "actor_rollout_ref.rollout"

ENGINES = ("vllm", "sglang", "trtllm")
"""The sections that verl reads."""
SOURCES: Mapping[str, tuple[str, ...]] = {
    "sglang": ("srt/server_args.py",),
    "vllm": ("engine/arg_utils.py", "entrypoints/openai/cli_args.py"),
}
"""The files of each engine that declare its arguments: as fields of the classes, and as options."""
CLASSES = ("ServerArgs", "EngineArgs", "AsyncEngineArgs", "BaseFrontendArgs", "FrontendArgs")
AS_OPTIONS = ("vllm",)
"""verl starts these through their command line, where `-` equals `_`; the others by keyword arguments."""
LOAD_FORMAT = "load_format"
LISTED = (LOAD_FORMAT, "logprobs_mode", "scheduling_policy")
"""Keys of `rollout` that verl passes on as the arguments of their names."""
_TEXT, _MEMBER = r'"([\w-]+)"', r"^    ([A-Z]\w+) = "
LISTS: Mapping[str, Mapping[str, tuple[str, str, str]]] = {
    "sglang": {
        name: ("srt/server_args.py", rf"^{name.upper()}_CHOICES = \[(.*?)\]", _TEXT)
        for name in (LOAD_FORMAT, "attention_backend", "moe_runner_backend")
    },
    "vllm": {
        LOAD_FORMAT: (
            "model_executor/model_loader/__init__.py",
            r"^LoadFormats = Literal\[(.*?)\]",
            _TEXT,
        ),
        "logprobs_mode": ("config/model.py", r"^LogprobsMode = Literal\[(.*?)\]", _TEXT),
        "scheduling_policy": ("config/scheduler.py", r"^SchedulerPolicy = Literal\[(.*?)\]", _TEXT),
        "attention_backend": (
            "v1/attention/backends/registry.py",
            r"^class AttentionBackendEnum\b(.*?)^    (?:@|def )",
            _MEMBER,
        ),
    },
}
"""By engine and argument, the file, the place and the form of the names that it may have."""
_RANKS = re.compile(r"^MaxLoRARanks = Literal\[([\d, ]+)\]", re.MULTILINE)


def check_engine_names(sections: Mapping[str, Any], chosen: str) -> None:
    """Raises ConfigError if `rollout.engine_kwargs` has a section that verl does not read.

    `chosen`: the engine of the run. Values of None are not passed on to an engine.
    """
    check_all(*(partial(_check_section, str(name), value, chosen) for name, value in sections.items()))


def _check_section(name: str, value: Any, chosen: str) -> None:
    if name not in ENGINES:
        raise ConfigError(
            f"{ROLLOUT}.engine_kwargs.{name} must be the section of an engine ({', '.join(ENGINES)}), got "
            f"{shown(name, value)}{hint(name, ENGINES)}; correct the name, or leave it out"
        )
    given = [key for key, one in value.items() if one is not None] if isinstance(value, Mapping) else []
    if given and name != chosen:
        raise ConfigError(
            f"{ROLLOUT}.engine_kwargs.{name}.{given[0]} requires {ROLLOUT}.name={name}, got "
            f"{ROLLOUT}.name={chosen}, which ignores it; leave it out, or choose that engine"
        )


def check_listed(engine: str, rollout: Mapping[str, Any]) -> None:
    """Raises ConfigError if the engine does not have the values of keys in `LISTED`."""
    check_all(*(partial(_check_name, engine, key, rollout.get(key)) for key in LISTED))


def _check_name(engine: str, key: str, name: Any) -> None:
    if name is not None and (known := listed(engine, key)) and name not in known:
        raise ConfigError(
            f"{ROLLOUT}.{key} must be one of {', '.join(known)} with the installed {engine}, got "
            f"{name!r}{hint(str(name), known)}; correct it"
        )


def check_arguments(engine: str, arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that the engine does not have, and for a switch that is no boolean.

    Without the engine on this machine, or if its source has another form, nothing is checked.
    """
    if not arguments or engine not in SOURCES:
        return
    if known := arguments_of(engine):
        check_all(*(partial(_check_argument, engine, str(key), arguments[key], known) for key in arguments))


def _check_argument(engine: str, key: str, value: Any, known: Mapping[str, bool]) -> None:
    name, path = key.replace("-", "_"), f"{ROLLOUT}.engine_kwargs.{engine}.{key}"
    given = name if engine in AS_OPTIONS else key
    if given not in known and not (engine in AS_OPTIONS and given.removeprefix("no_") in known):
        raise ConfigError(
            f"{path} must be an argument of the installed {engine}, got "
            f"{shown(key, value)}{hint(name, sorted(known))}; correct the name, or leave it out"
        )
    if known.get(given) and value is not None and not isinstance(value, bool):
        raise ConfigError(
            f"{path} must be True or False, got {shown(key, value)}; correct it, or leave it out"
        )
    names = listed(engine, given)
    if names and value is not None and str(value).lower() not in map(str.lower, names):
        raise ConfigError(
            f"{path} must be one of {', '.join(names)} with the installed {engine}, got "
            f"{shown(key, value)}{hint(str(value), names)}; correct it, or leave it out"
        )


def check_replaced(
    engine: str,
    arguments: Mapping[str, Any],
    remedies: Mapping[str, str],
    is_default: Callable[[Any], bool] = lambda value: value in (None, False),
) -> None:
    """Raises ConfigError if an argument is set that the pipeline sets; `remedies` by name."""
    named = {str(key): (str(key).replace("-", "_"), value) for key, value in arguments.items()}
    problems = [
        f"{ROLLOUT}.engine_kwargs.{engine}.{key} must not be set, got {value!r}; {remedies[name]}"
        for key, (name, value) in named.items()
        if name in remedies and not is_default(value)
    ]
    if problems:
        raise ConfigError(*problems)


@cache
def arguments_of(engine: str) -> Mapping[str, bool]:
    """Return an engine's arguments, and whether each is a switch, or nothing if they cannot be read."""
    try:
        texts = [_source(engine, file) for file in SOURCES[engine]]
        pairs = [pair for text in texts for pair in declared_arguments(text, options=engine in AS_OPTIONS)]
        # An option has the type of the field of its name.
        return {name: (name, True) in pairs for name, _ in pairs}
    except (IndexError, OSError, SyntaxError, ValueError):
        return {}


def largest_adapter_rank() -> int | None:
    """Return the largest rank of an adapter that vLLM serves, or None if it cannot be read here."""
    try:
        ranks = _RANKS.search(_source("vllm", "config/lora.py"))
    except (IndexError, OSError, ValueError):
        return None
    return max(map(int, ranks[1].split(","))) if ranks else None


def listed(engine: str, argument: str) -> tuple[str, ...]:
    """Return the names that an argument may have.

    Returns nothing if its source has no list, it cannot be read, or plugins may add some.
    """
    if argument not in LISTS.get(engine, {}):
        return ()
    file, place, name = LISTS[engine][argument]
    known = (f"{engine}.", "recipe.async_pipeline.")
    if not all(plugin.startswith(known) for plugin in plugins_of(f"{engine}.general_plugins")):
        return ()
    try:
        found = re.search(place, _source(engine, file), re.MULTILINE | re.DOTALL)
    except (IndexError, OSError, ValueError):
        return ()
    return tuple(dict.fromkeys(re.findall(name, found[1], re.MULTILINE))) if found else ()


def _source(engine: str, file: str) -> str:
    """Raises IndexError, OSError or ValueError if a file of an engine cannot be read."""
    spec = find_spec(engine)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0], file).read_text(encoding="utf-8")


def declared_arguments(source: str, *, options: bool) -> Iterator[tuple[str, bool]]:
    """Yield the fields of `CLASSES`, and with `options` the long ones of calls of `add_argument`.

    A field is a switch if its annotation has no other type than `bool`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name in CLASSES:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    types = {*ast.unparse(field.annotation).split(" | ")} - {"None"}
                    yield field.target.id, types <= {"bool", "Optional[bool]"}
        if options and isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            for option in node.args:
                if isinstance(option, ast.Constant) and str(option.value).startswith("--"):
                    yield str(option.value)[2:].replace("-", "_"), False
