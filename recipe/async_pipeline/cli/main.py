# SPDX-License-Identifier: Apache-2.0
"""The command `async-pipeline`: a table of subcommands, each a module that is imported on use.

A subcommand's module defines `add_arguments(parser)` and `run(args) -> int`. Exit status: 0 success, 2 user
error (usage, configuration, patches, run files, a package that is not installed), 1 any other error, 130
after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from recipe.async_pipeline.errors import (
    AsyncPipelineError,
    ConfigError,
    ContractError,
    PatchError,
    RunFilesError,
)

from ..console import EXIT_CTRL_C, EXIT_OURS, EXIT_USERS, echo, replace_closed_streams
from ..processes import end_signals

STDOUT = 1
"""The descriptor."""
USERS = (ConfigError, ContractError, PatchError, RunFilesError)
"""Errors of the user, who can correct them."""


class Subcommand(NamedTuple):
    """The module of a subcommand, and its line in `--help`."""

    module: str
    help: str


SUBCOMMANDS: dict[str, Subcommand] = {
    "bench": Subcommand(
        "recipe.async_pipeline.lab.cli.bench",
        "measure this package's strategies and verl's trainers side by side",
    ),
    "doctor": Subcommand(
        "recipe.async_pipeline.tools.cli.doctor",
        "check the requirements of a run and print a remedy for each problem",
    ),
    "episodes": Subcommand(
        "recipe.async_pipeline.tools.cli.episodes", "print trained episodes of a run as text, the worst first"
    ),
    "explain": Subcommand(
        "recipe.async_pipeline.tools.cli.explain", "print the plan of a training command without starting Ray"
    ),
    "ledger": Subcommand(
        "recipe.async_pipeline.tools.cli.ledger", "verify that a run lost no prompt and trained none twice"
    ),
    "patch": Subcommand(
        "recipe.async_pipeline.tools.cli.patch",
        "fetch the pinned verl; apply, revert or refresh patches",
    ),
    "plan": Subcommand(
        "recipe.async_pipeline.tools.cli.plan",
        "search pools, strategy and lag for a profile; may advise against asynchrony",
    ),
    "profile": Subcommand(
        "recipe.async_pipeline.tools.cli.profile", "extract a profile from a run, for simulate and plan"
    ),
    "replicas": Subcommand(
        "recipe.async_pipeline.cli.replicas", "list, add or remove rollout replicas of a running run"
    ),
    "report": Subcommand(
        "recipe.async_pipeline.tools.cli.report", "write report.html for one run, or compare two runs"
    ),
    "serve": Subcommand(
        "recipe.async_pipeline.tools.cli.serve", "show runs in a browser while they are still running"
    ),
    "simulate": Subcommand(
        "recipe.async_pipeline.tools.cli.simulate",
        "simulate the pipeline in virtual time on any number of devices",
    ),
    "soak": Subcommand(
        "recipe.async_pipeline.lab.cli.soak",
        "inject faults into the toy task on the real stack, and verify that nothing is lost",
    ),
    "task": Subcommand("recipe.async_pipeline.lab.cli.task", "make the model and the data of the smoke run"),
    "translate": Subcommand(
        "recipe.async_pipeline.tools.cli.translate",
        "translate a configuration of ROLL, rLLM or uni-agent, and say what becomes of every key",
    ),
    "verify-gpu": Subcommand(
        "recipe.async_pipeline.lab.cli.verify_gpu",
        "show within minutes what works on a machine with GPUs, and write a report",
    ),
    "watch": Subcommand(
        "recipe.async_pipeline.cli.watch",
        "run a training command: show its steps, log the rest, clean up afterwards",
    ),
}


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """Return the parser; only the module of the `chosen` subcommand is imported."""
    parser = argparse.ArgumentParser(
        prog="async-pipeline",
        description="Asynchronous RL post-training on pinned and patched verl.",
        epilog="exit status: 0 success, 2 user error (named in the message), 1 any other error",
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
    """Convert SIGTERM and SIGHUP to SystemExit, so that a terminated subcommand cleans up as after Ctrl-C.

    No-op outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _exit) for number in end_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command; overrides of hydra may stand before, between and after its options."""
    args, more = parser.parse_known_args(arguments)
    odd = [word for word in more if word.startswith("-")]
    # `inputs` of translate; its option --overrides is no list.
    taken = next((name for name in ("inputs", "overrides") if isinstance(getattr(args, name, 0), list)), None)
    if more and (odd or taken is None):
        parser.error(f"unrecognized arguments: {' '.join(odd or more)}")
    if more and taken is not None:
        setattr(args, taken, [*getattr(args, taken), *more])
    return args


def _reader_is_gone() -> bool:
    """Return whether the reader of stdout, such as head, has ended. The rest goes nowhere then."""
    output = select.poll()
    output.register(STDOUT, 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):
        return False
    # Python flushes its buffer at the end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status; an unexpected error propagates."""
    replace_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = command = next((word for word in arguments if not word.startswith("-")), None)

    try:
        args = _parsed(build_parser(chosen), arguments)
        if getattr(args, "instead", None) is not None:
            command = f"{chosen} {args.instead}"
        with terminated():
            return int(importlib.import_module(SUBCOMMANDS[args.subcommand].module).run(args))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "recipe"):
            raise
        echo(
            f"async-pipeline {command}: it needs {package}, which is not installed for {sys.executable}; "
            "`pip install -e .` installs this package's requirements, and `async-pipeline doctor` says what "
            "else is missing",
            file=sys.stderr,
        )
        return EXIT_USERS
    except KeyboardInterrupt:
        echo(f"async-pipeline {command}: interrupted", file=sys.stderr)
        return EXIT_CTRL_C
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return EXIT_OURS
    except AsyncPipelineError as error:
        echo(f"async-pipeline {command}: {error.report}", file=sys.stderr)
        return EXIT_USERS if isinstance(error, USERS) else EXIT_OURS
