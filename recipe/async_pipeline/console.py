# SPDX-License-Identifier: Apache-2.0
"""Exit statuses, and output to the user."""

from __future__ import annotations

import os
import sys
from typing import TextIO

EXIT_OK, EXIT_OURS, EXIT_USERS, EXIT_CTRL_C = 0, 1, 2, 130


def echo(text: str, *, file: TextIO | None = None) -> None:
    """Write one line of the command's own output (to stdout by default) and flush it.

    Characters that the stream's encoding lacks are escaped.
    """
    stream = file or sys.stdout
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def replace_closed_streams() -> None:
    """Give a process without stdin, stdout or stderr an empty one, so that no file takes its descriptor."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)  # the lowest descriptor that is free
        if opened != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)
        setattr(sys, name, open(descriptor, "w" if descriptor else "r", encoding="utf-8"))


def write_whole(descriptor: int, text: bytes) -> None:
    """Write all of `text`, unbuffered. Raises OSError."""
    while text:
        text = text[os.write(descriptor, text) :]
