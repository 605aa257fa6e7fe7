# SPDX-License-Identifier: Apache-2.0
"""Lines for the user from the trainer's process; `watch` finds them in the output of a run."""

from __future__ import annotations

import os

from ...observe.table import MARK


def say(text: str) -> None:
    """A line for the user."""
    echo(f"{MARK} {text}")


def echo(line: str) -> None:
    # Ray forwards the standard output of this actor to the user's terminal.
    os.write(1, f"{line}\n".encode())
