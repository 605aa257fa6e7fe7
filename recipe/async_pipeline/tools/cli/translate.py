# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline translate SYSTEM [FILE] [OVERRIDE ...]`: say what becomes of every key of another system.

Exit status 0 if every key is known and has no wrong value, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...config.keys.foreign_keys import Document
from ...config.keys.overrides import hydra_value
from ...console import echo
from ...errors import ConfigError, PatchError
from ...installed.verl import find_verl_root, keys_of_tree
from ...redaction import shown
from ..translate.async_flow import translate_async_flow
from ..translate.composition import composed
from ..translate.rllm import translate_rllm
from ..translate.roll import translate_roll
from ..translate.rules import TranslatedFile
from ..translate.uni_agent import translate_uni_agent
from ..translate.verls_keys import with_plus


class System(NamedTuple):
    """A system whose configurations are translated."""

    translate: Callable[[Document, Collection[str]], TranslatedFile]
    """Gets the document, and the paths that it refers to itself."""
    group: str = ""
    """The folder of its files whose keys belong into a section of that name."""


SYSTEMS: Mapping[str, System] = {
    "roll": System(translate_roll),
    "rllm": System(translate_rllm, "rllm"),
    "uni-agent": System(translate_uni_agent),
    "asyncflow": System(translate_async_flow),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline translate`."""
    parser.add_argument("system", choices=tuple(SYSTEMS), help="the system that the configuration is for")
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="FILE_OR_OVERRIDE",
        help="its configuration, in YAML, and overrides of it, such as a.b=1, +a.b=1, ~a.b or group=name",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument(
        "--overrides",
        action="store_true",
        help="print only the overrides, one a line, for a training command",
    )


def run(args: argparse.Namespace) -> int:
    """Print the translation. Raises ConfigError if the file or an override cannot be read."""
    system = SYSTEMS[args.system]
    file, overrides = _file_and_overrides(args.inputs)
    document, variables, problems = composed(file, overrides, system.group)
    if not document:
        raise ConfigError(
            f"{file or 'the overrides'} must have keys, got none; give the configuration of a run"
        )
    found = with_plus(system.translate(document, variables), _verls_keys())
    if args.json:
        echo(json.dumps(as_json(found, problems), indent=2))
    else:
        for line in overrides_of(found) if args.overrides else in_words(found, problems):
            echo(line)
        if args.overrides:
            # Apart from the overrides, which are meant to be read by a program.
            for line in (*(f"not composed: {problem}" for problem in problems), *summary(found)):
                echo(f"async-pipeline translate: {line}", file=sys.stderr)
    return 1 if found.unknown or found.unsupported else 0


def _verls_keys() -> Collection[Mapping[str, Any]]:
    """Return verl's configurations, or nothing if verl is not there."""
    try:
        return keys_of_tree(find_verl_root()).values()
    except PatchError:
        return ()


def _file_and_overrides(inputs: list[str]) -> tuple[Path | None, list[str]]:
    """Raises ConfigError if there are several files."""
    overrides = [text for text in inputs if "=" in text or text.startswith("~")]
    files = [text for text in inputs if text not in overrides]
    if len(files) > 1:
        raise ConfigError(
            f"one FILE is translated, got {', '.join(files)}; name parents in its defaults list, and write "
            "overrides as KEY=VALUE or ~KEY"
        )
    return Path(files[0]) if files else None, overrides


def overrides_of(found: TranslatedFile) -> list[str]:
    """Return the overrides for a training command."""
    return [f"{path}={hydra_value(value)}" for path, value in found.overrides.items()]


def in_words(found: TranslatedFile, problems: Collection[str]) -> Iterator[str]:
    """Yield the fate of each key, and then the overrides."""
    yield "what became of each key:"
    for one in found.keys:
        became = [f"{path}={hydra_value(value)}" for path, value in one.outcome.overrides.items()]
        text = "; ".join(filter(None, [", ".join(became), one.outcome.text]))
        yield f"  {one.outcome.kind:13}  {one.key}={shown(one.key, one.value)}  ->  {text or 'the same here'}"
    yield ""
    yield "overrides for `python -m verl.trainer.main_ppo`:"
    yield from (f"  {override}" for override in overrides_of(found))
    if found.missing:
        yield ""
        yield "not in the file, and needed:"
        yield from (f"  {line}" for line in found.missing)
    if problems:
        yield ""
        yield "not composed:"
        yield from (f"  {problem}" for problem in problems)
    for line in summary(found):
        yield ""
        yield line


def summary(found: TranslatedFile) -> Iterator[str]:
    """Yield a line for the unsupported and one for the unknown keys."""
    for kind, keys in (("unsupported", found.unsupported), ("unknown", found.unknown)):
        if keys:
            yield f"{len(keys)} of {len(found.keys)} keys are {kind}: {', '.join(keys)}"


def as_json(found: TranslatedFile, problems: Collection[str]) -> dict[str, Any]:
    """Return the translation as plain values."""
    keys = [
        {
            "key": one.key,
            "kind": one.outcome.kind,
            "overrides": dict(one.outcome.overrides),
            "text": one.outcome.text,
        }
        for one in found.keys
    ]
    return {
        "keys": keys,
        "overrides": dict(found.overrides),
        "missing": list(found.missing),
        "not_composed": list(problems),
        "unsupported": found.unsupported,
        "unknown": found.unknown,
    }
