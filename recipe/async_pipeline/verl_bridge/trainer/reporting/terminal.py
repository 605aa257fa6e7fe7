# SPDX-License-Identifier: Apache-2.0
"""Write lines for the user from the trainer's process; `watch` finds them in the output of a run."""

from __future__ import annotations

from contextlib import suppress

from ....console import write_whole
from ....observe.table import marked


def say(text: str) -> None:
    """Write lines for the user, with the mark that `watch` looks for."""
    echo(marked(text))


def echo(line: str) -> None:
    """Write a line without the mark. It is lost if the disk of Ray's logs is full."""
    # Ray forwards the standard output of this actor to the user's terminal.
    with suppress(OSError):
        write_whole(1, f"{line}\n".encode())
