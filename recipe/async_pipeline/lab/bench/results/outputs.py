# SPDX-License-Identifier: Apache-2.0
"""Options for the output files of a benchmark, their check before it runs, and the directory of its logs."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ....errors import ConfigError

PICTURES = (".png", ".svg", ".pdf")


def add_logs_option(parser: argparse.ArgumentParser) -> None:
    """Add `--logs` to a subcommand of `bench`, which has the option too and the default for both."""
    parser.add_argument(
        "--logs",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="keep the output of the jobs in DIR (default: kept only if one fails)",
    )


def check_outputs(json_file: Path | None, picture: Path | None, logs: Path | None) -> None:
    """Check that all outputs can be written at the end. Raises ConfigError if one cannot."""
    for option, path in (("--json", json_file), ("--picture", picture)):
        if path is None:
            continue
        folder = path.resolve().parent
        if not folder.is_dir():
            raise ConfigError(f"{option} {path}: the directory {path.parent} does not exist; create it")
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(f"{option} {path} cannot be written; name a file in a writable directory")

    if picture is not None and picture.suffix not in PICTURES:
        raise ConfigError(f"--picture {picture} must end in one of {', '.join(PICTURES)}")
    if picture is not None and json_file is not None and picture.resolve() == json_file.resolve():
        raise ConfigError(f"--json and the picture are both {picture}; name another file for one of them")

    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "the picture needs matplotlib; `pip install matplotlib`, or omit --json and --picture"
        )

    if logs is not None and logs.exists() and any(logs.iterdir()):
        raise ConfigError(f"--logs {logs} is not empty; name another directory")


@contextmanager
def job_logs(given: Path | None, failed: Mapping[str, str]) -> Iterator[Path]:
    """Provide the directory for job output: `given`, or a temporary one.

    The temporary directory is kept if `failed` has an entry or the body raises.
    """
    if given is not None:
        yield given.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="async-pipeline-bench-"))
    yield folder
    if not failed:
        shutil.rmtree(folder)
