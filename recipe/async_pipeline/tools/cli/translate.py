# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline translate SYSTEM FILE`: say what becomes of every key of another system's configuration.

Exit status 0 if something is known of every key, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ...config.foreign_keys import Document
from ...config.overrides import hydra_value
from ...console import echo
from ...errors import ConfigError
from ...redaction import shown
from ..translate.rllm import translate_rllm
from ..translate.roll import translate_roll
from ..translate.rules import TranslatedFile
from ..translate.uni_agent import translate_uni_agent

SYSTEMS: Mapping[str, Callable[[Document], TranslatedFile]] = {
    "roll": translate_roll,
    "rllm": translate_rllm,
    "uni-agent": translate_uni_agent,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline translate`."""
    parser.add_argument("system", choices=tuple(SYSTEMS), help="the system that the file is for")
    parser.add_argument("file", type=Path, metavar="FILE", help="its configuration, in YAML")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument(
        "--overrides",
        action="store_true",
        help="print only the overrides, one a line, for a training command",
    )


def run(args: argparse.Namespace) -> int:
    """Print the translation. Raises ConfigError if the file cannot be read or a value is wrong."""
    found = SYSTEMS[args.system](read(args.file))
    if args.json:
        echo(json.dumps(as_json(found), indent=2))
    else:
        for line in overrides_of(found) if args.overrides else in_words(found):
            echo(line)
        if args.overrides and found.unknown:
            # Apart from the overrides, which are meant to be read by a program.
            echo(f"async-pipeline translate: {unknown_in_words(found)}", file=sys.stderr)
    return 1 if found.unknown else 0


def read(file: Path) -> dict[str, Any]:
    """Return the content of a file, with its interpolations resolved. Raises ConfigError if it has none."""
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{file}: {str(error).splitlines()[0]}; replace the interpolation by its value"
        ) from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{file} must be a mapping of keys, got a {type(loaded).__name__}")
    if not loaded:
        raise ConfigError(f"{file} must have keys, got an empty file; give the configuration of a run")
    return {str(name): value for name, value in loaded.items()}


def overrides_of(found: TranslatedFile) -> list[str]:
    """Return the overrides for a training command."""
    return [f"{path}={hydra_value(value)}" for path, value in found.overrides.items()]


def in_words(found: TranslatedFile) -> Iterator[str]:
    """Yield the fate of each key, and then the overrides."""
    yield "what became of each key:"
    for one in found.keys:
        became = [f"{path}={hydra_value(value)}" for path, value in one.outcome.overrides.items()]
        text = "; ".join(filter(None, [", ".join(became), one.outcome.text]))
        yield f"  {one.outcome.kind:13}  {one.key}={shown(one.key, one.value)}  ->  {text}"
    yield ""
    yield "overrides for `python -m verl.trainer.main_ppo`:"
    yield from (f"  {override}" for override in overrides_of(found))
    if found.missing:
        yield ""
        yield "not in the file, and needed:"
        yield from (f"  {line}" for line in found.missing)
    if found.unknown:
        yield ""
        yield unknown_in_words(found)


def unknown_in_words(found: TranslatedFile) -> str:
    """Return one line that names the unknown keys."""
    return f"{len(found.unknown)} of {len(found.keys)} keys are unknown: {', '.join(found.unknown)}"


def as_json(found: TranslatedFile) -> dict[str, Any]:
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
        "unknown": found.unknown,
    }
