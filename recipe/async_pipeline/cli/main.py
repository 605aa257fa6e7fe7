# SPDX-License-Identifier: Apache-2.0
"""The command `async-pipeline`: one literal table of subcommands, each a module that is loaded when asked
for.

Such a module has `add_arguments(parser)` and `run(args) -> int`. Exit status: 0 all is well, 2 the user's
mistake (usage, configuration, patches), 1 ours.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from recipe.async_pipeline.errors import AsyncPipelineError, ConfigError, PatchError, RunFilesError

from ..console import EXIT_CTRL_C, EXIT_OURS, EXIT_USERS, echo


class Subcommand(NamedTuple):
    """Where a subcommand lives, and its line in `--help`."""

    module: str
    help: str


SUBCOMMANDS: dict[str, Subcommand] = {
    "bench": Subcommand(
        "recipe.async_pipeline.cli.bench", "measure our strategies and verl's own trainers side by side"
    ),
    "doctor": Subcommand(
        "recipe.async_pipeline.cli.doctor", "check what a run needs, and say how to mend it"
    ),
    "explain": Subcommand(
        "recipe.async_pipeline.cli.explain", "print the plan of a training command, without starting Ray"
    ),
    "ledger": Subcommand(
        "recipe.async_pipeline.cli.ledger", "check that a run lost no prompt and trained none twice"
    ),
    "patch": Subcommand(
        "recipe.async_pipeline.cli.patch",
        "fetch the pinned verl; apply, revert or refresh patches",
    ),
    "plan": Subcommand(
        "recipe.async_pipeline.cli.plan",
        "search devices, pools, strategy and lag for a profile; may say: do not",
    ),
    "profile": Subcommand(
        "recipe.async_pipeline.cli.profile", "extract a profile from a run, for simulate and plan"
    ),
    "report": Subcommand(
        "recipe.async_pipeline.cli.report", "write report.html of a run, or of two side by side"
    ),
    "simulate": Subcommand(
        "recipe.async_pipeline.cli.simulate",
        "run the pipeline in virtual time on any number of devices",
    ),
    "soak": Subcommand(
        "recipe.async_pipeline.cli.soak",
        "run the small task on the real stack under injected faults, and check that nothing is lost",
    ),
    "task": Subcommand("recipe.async_pipeline.cli.task", "make the small model and data of the smoke run"),
    "watch": Subcommand(
        "recipe.async_pipeline.cli.watch",
        "run a training command: show its steps, log the rest, leave nothing behind",
    ),
}


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """Return the parser; only the module of the `chosen` subcommand is imported, for its arguments."""
    parser = argparse.ArgumentParser(
        prog="async-pipeline",
        description="Asynchronous RL post-training on pinned and patched verl.",
        epilog="exit status: 0 all is well, 2 your mistake (the message says which), 1 ours",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    rows = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    for name, (module, text) in SUBCOMMANDS.items():
        row = rows.add_parser(name, help=text, description=text)
        if name == chosen:
            importlib.import_module(module).add_arguments(row)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("async_pipeline")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


@contextmanager
def terminated() -> Iterator[None]:
    """SIGTERM raises SystemExit, as Ctrl-C raises KeyboardInterrupt, so that whoever has started processes
    ends them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return the exit status. An error that is nobody's plan propagates (status 1)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    args = build_parser(chosen).parse_args(arguments)
    try:
        with terminated():
            return int(importlib.import_module(SUBCOMMANDS[args.subcommand].module).run(args))
    except KeyboardInterrupt:
        echo(f"async-pipeline {args.subcommand}: interrupted", file=sys.stderr)
        return EXIT_CTRL_C
    except AsyncPipelineError as error:
        echo(f"async-pipeline {args.subcommand}: {error}", file=sys.stderr)
        return EXIT_USERS if isinstance(error, ConfigError | PatchError | RunFilesError) else EXIT_OURS
