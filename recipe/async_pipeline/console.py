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


def write_whole(descriptor: int, text: bytes) -> None:
    """Write all of `text`, unbuffered. Raises OSError."""
    while text:
        text = text[os.write(descriptor, text) :]
