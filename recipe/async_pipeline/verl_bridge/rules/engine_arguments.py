# SPDX-License-Identifier: Apache-2.0
"""Refuse arguments of a rollout engine that the installed engine does not have.

verl passes `rollout.engine_kwargs.<engine>` on as it is, so a misspelled name would fail in a server, minutes
after Ray has started. The names are read from the engine's source: importing an engine takes seconds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ...config.paths import hint
from ...errors import ConfigError
from ...installed.engines import find_spec
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
_RANKS = re.compile(r"^MaxLoRARanks = Literal\[([\d, ]+)\]", re.MULTILINE)


def check_engine_names(sections: Mapping[str, Any], chosen: str) -> None:
    """Raises ConfigError if `rollout.engine_kwargs` has a section that verl does not read.

    `chosen`: the engine of the run. Values of None are not passed on to an engine.
    """
    for name, value in sections.items():
        if name not in ENGINES:
            raise ConfigError(
                f"{ROLLOUT}.engine_kwargs.{name} must be the section of an engine ({', '.join(ENGINES)}), "
                f"got {shown(str(name), value)}{hint(str(name), ENGINES)}; correct the name, or leave it out"
            )
        given = [key for key, one in value.items() if one is not None] if isinstance(value, Mapping) else []
        if given and name != chosen:
            path = f"{ROLLOUT}.engine_kwargs.{name}.{given[0]}"
            raise ConfigError(
                f"{path} requires {ROLLOUT}.name={name}, got {ROLLOUT}.name={chosen}, which ignores it; "
                "leave it out, or choose that engine"
            )


def check_arguments(engine: str, arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that the engine does not have, and for a switch that is no boolean.

    Without the engine on this machine, or if its source has another form, nothing is checked.
    """
    if not arguments or engine not in SOURCES:
        return
    known = arguments_of(engine)
    if not known:
        return

    for key, value in arguments.items():
        name = str(key).replace("-", "_") if engine in AS_OPTIONS else str(key)
        if name not in known and not (engine in AS_OPTIONS and name.removeprefix("no_") in known):
            raise ConfigError(
                f"{ROLLOUT}.engine_kwargs.{engine}.{key} must be an argument of the installed {engine}, "
                f"got {shown(str(key), value)}{hint(name.replace('-', '_'), sorted(known))}; correct the "
                "name, or leave it out"
            )
        if known.get(name) and value is not None and not isinstance(value, bool):
            raise ConfigError(
                f"{ROLLOUT}.engine_kwargs.{engine}.{key} must be True or False, got "
                f"{shown(str(key), value)}; correct it, or leave it out"
            )


@cache
def arguments_of(engine: str) -> Mapping[str, bool]:
    """Return an engine's arguments, and whether each is a switch, or nothing if they cannot be read."""
    try:
        spec = find_spec(engine)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        texts = [Path(folders[0], file).read_text(encoding="utf-8") for file in SOURCES[engine]]
        pairs = [pair for text in texts for pair in declared_arguments(text, options=engine in AS_OPTIONS)]
        # An option has the type of the field of its name.
        return {name: (name, True) in pairs for name, _ in pairs}
    except (IndexError, OSError, SyntaxError, ValueError):
        return {}


def largest_adapter_rank() -> int | None:
    """Return the largest rank of an adapter that vLLM serves, or None if it cannot be read here."""
    try:
        spec = find_spec("vllm")
        folders = list(spec.submodule_search_locations or ()) if spec else []
        ranks = _RANKS.search(Path(folders[0], "config", "lora.py").read_text(encoding="utf-8"))
    except (IndexError, OSError, ValueError):
        return None
    return max(map(int, ranks[1].split(","))) if ranks else None


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
