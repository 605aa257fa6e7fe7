# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline explain`: print the plan of a training command without starting Ray."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ...config.keys.entry_points import EntryPoint, entry_of_command
from ...config.keys.misplaced import SWITCHES
from ...config.keys.older_verl import modernised
from ...config.keys.overrides import quote_names
from ...config.paths import MODE
from ...console import echo
from ...errors import ConfigError
from ...installed.engines import installed
from ...installed.verl import find_verl_root
from ...verl_bridge.launch.command_line import checked_with, composed, of_verls_entry_point
from ...verl_bridge.launch.engine_contract import check_engine
from ...verl_bridge.launch.run_config import apply_entry_point
from ...verl_bridge.rules.config_checks import Checked, set_verls_keys
from ...verl_bridge.rules.spelling import without_unread
from ...verl_bridge.rules.verl_keys import has_key
from ..explain.reference import render_help
from ..explain.run_plan import as_json, describe_plan, plan_of

ALL = "all"
"""The value of `--knobs` without a section."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline explain`."""
    parser.add_argument(
        "--config-path",
        "-cp",
        type=Path,
        metavar="DIR",
        help="folder of the configuration, as for verl's entry point, also relative to it (default: verl's)",
    )
    parser.add_argument(
        "--config-name",
        "-cn",
        default="ppo_trainer",
        metavar="NAME",
        help="name of the configuration (default: %(default)s)",
    )

    parser.add_argument("--json", dest="as_json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--knobs",
        nargs="?",
        const=ALL,
        metavar="SECTION",
        help="list the knobs, all or of one section, with values, defaults and meanings; print no plan",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="hydra overrides, as for the training command"
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan, or the knobs. Raises ConfigError if the run would not start."""
    if args.knobs is not None:
        for line in render_help(None if args.knobs == ALL else args.knobs):
            echo(line)
        return 0

    entry = entry_of_command(args.config_name, args.overrides)
    named = entry is not None and args.config_name.removesuffix(".yaml") in entry.configs
    given = args.overrides
    args.overrides, moved, wrong = modernised(given, has_key)
    if entry is not None:
        args.config_path, args.config_name, args.overrides = _of_entry_point(entry, args)
    elif args.config_path is not None and not args.config_path.is_dir():
        args.config_path = of_verls_entry_point(args.config_path)
    if args.config_path is None:  # a configuration of the user may read any key
        args.overrides, more = without_unread(args.overrides)
        moved = (*moved, *more)
    overrides = [quote_names(word) for word in args.overrides]
    try:
        config, problems = composed(args.config_path, args.config_name, overrides)
    except ConfigError as error:
        raise ConfigError(*error.problems, *wrong) from None
    overrides, assumed = _with_switch(config, overrides, given)
    moved = (*assumed, *moved)

    rewriting: tuple[str, ...] = ()
    if entry is not None:
        translated, unsupported = apply_entry_point(config, entry)
        start = "start it as before," if named else "keys of another entry point: start"
        rewriting = (f"{start} python -m {entry.module}, and add +async_pipeline=True", *translated)
        problems += unsupported
    rewriting = (*rewriting, *moved)
    found = _checked_elsewhere((*problems, *wrong), config, rewriting)
    notes = (*rewriting, *found.translation.notes, *set_verls_keys(config, found, overrides))
    warning = check_engine(config, found.translation.config.engine_check)
    notes = (*notes, *(f"not checked: {one}" for one in found.unchecked))
    notes = notes if warning is None else (warning, *notes)
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    name = config.actor_rollout_ref.rollout.name
    plan = plan_of(
        {str(k): v for k, v in resolved.items()},
        found.translation.config,
        found.placement,
        found.old_logp,
        next((engine.version for engine in installed() if engine.name == name), None),
    )
    if args.as_json:
        echo(json.dumps(as_json(plan) | {"notes": list(notes)}, indent=2))
        return 0
    echo("\n".join((*notes, *describe_plan(plan))))
    return 0


def _with_switch(
    config: DictConfig, overrides: list[str], given: list[str]
) -> tuple[list[str], tuple[str, ...]]:
    """Switch the pipeline on in a config and its overrides, since the plan is about it.

    Returns the overrides, and a note if the `given` ones choose another trainer.
    """
    if any(OmegaConf.select(config, path) is not None for path in SWITCHES):
        return overrides, ()
    OmegaConf.update(config, "async_pipeline", True, force_add=True)
    verls = [word.partition("=")[2] for word in given if word.startswith(f"{MODE}=")]
    notes = (f"+async_pipeline=True is assumed; without it, verl's {verl} runs" for verl in verls)
    return ["+async_pipeline=True", *overrides], tuple(notes)


def _checked_elsewhere(problems: tuple[str, ...], config: DictConfig, notes: tuple[str, ...]) -> Checked:
    """Return what the checks find; if they refuse the config, print `notes` and what is not here before."""
    absent = list[str]()
    # Where verl is imported after all, it warns about engines that are not installed.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return checked_with(problems, config, absent=absent)
        except ConfigError:
            for line in (*notes, *(f"not checked: {one}" for one in absent)):
                echo(line, file=sys.stderr)
            raise


def _of_entry_point(entry: EntryPoint, args: argparse.Namespace) -> tuple[Path | None, str, list[str]]:
    """Return folder and name of the configuration of another entry point of verl, and the overrides.

    Scripts give `--config-path` relative to the entry point, so a folder counts if the file is there.
    """
    name = args.config_name.removesuffix(".yaml")
    if args.config_path is not None and (args.config_path / f"{name}.yaml").is_file():
        return args.config_path, name, args.overrides
    if entry.folder is None:
        verls = "ppo_megatron_trainer" if "megatron" in name else "ppo_trainer"
        return None, verls, [*entry.overrides, *args.overrides]
    folder = find_verl_root() / "verl" / entry.folder
    return folder, name if name in entry.configs else entry.configs[0], args.overrides
