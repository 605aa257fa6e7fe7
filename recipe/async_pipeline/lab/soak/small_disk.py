# SPDX-License-Identifier: Apache-2.0
"""A small in-memory disk for the files of a run that can be filled to the last byte."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import ConfigError

SIZE_MB = 256
FILLER = "filler"
BLOCK = 1 << 16


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount the disk on `folder` while the context lasts. Raises ConfigError if this user may not mount."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m,mode=0700", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"--faults full_disk must mount a small disk, which failed ({done.stderr.strip()}); run as root, "
            "or leave the fault out"
        )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Write until the disk is full."""
    with (folder / FILLER).open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * BLOCK)
        except OSError:
            return


def empty(folder: Path) -> None:
    """Delete the file that `fill` wrote."""
    (folder / FILLER).unlink(missing_ok=True)
