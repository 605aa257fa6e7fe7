# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline explain`: print the plan of a training command without starting Ray."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf

from ..config.misplaced import SWITCHES
from ..config.overrides import explain_complaint
from ..config.reference import render_help
from ..config.run_plan import as_json, describe_plan, plan_of
from ..console import echo
from ..errors import ConfigError
from ..patching.verl_source import find_verl_root
from .verl_keys import near_key

ALL = "all"
"""The value of `--knobs` without a section."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline explain`."""
    parser.add_argument(
        "--config-path",
        type=Path,
        metavar="DIR",
        help="folder of the configuration, as for verl's entry point (default: verl's)",
    )
    parser.add_argument(
        "--config-name",
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

    config = _composed(args.config_path, args.config_name, args.overrides)
    if all(OmegaConf.select(config, path) is None for path in SWITCHES):
        # `explain` implies the switch: the plan is about the pipeline.
        config = _composed(args.config_path, args.config_name, ["+async_pipeline=True", *args.overrides])

    # Importing verl takes seconds and warns about engines that are not installed.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ..verl_bridge.config_checks import checked
        from ..verl_bridge.launch import set_verls_keys

    found = checked(config)
    if found is None:
        raise ConfigError("the pipeline is switched off; remove the override that does so")
    notes = (*found.translation.notes, *set_verls_keys(config, found, args.overrides))
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    plan = plan_of(
        {str(k): v for k, v in resolved.items()}, found.translation.config, found.placement, found.old_logp
    )
    if args.as_json:
        echo(json.dumps(as_json(plan) | {"notes": list(notes)}, indent=2))
        return 0
    for line in (*notes, *describe_plan(plan)):
        echo(line)
    return 0


def _composed(folder: Path | None, name: str, overrides: list[str]) -> Any:
    """Return the configuration as verl's entry point would see it. Raises ConfigError if hydra refuses it."""
    verl = find_verl_root() / "verl" / "trainer" / "config"
    GlobalHydra.instance().clear()
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--config-path must be a directory, got {str(folder)!r}")
    try:
        with initialize_config_dir(config_dir=str((folder or verl).resolve()), version_base=None):
            return compose(config_name=name, overrides=[f"hydra.searchpath=[file://{verl}]", *overrides])
    except (HydraException, ValueError) as error:
        first = str(error).split("\n")[0]
        raise ConfigError(explain_complaint(first, near_key) or first) from None
