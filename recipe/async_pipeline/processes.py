# SPDX-License-Identifier: Apache-2.0
"""What a process does to itself, once it is started, for the sake of the one that started it."""

from __future__ import annotations

import ctypes
import signal
import sys

_SET_PDEATHSIG, _SET_NO_NEW_PRIVS = 1, 38
"""Linux's prctl."""


def end_with_parent() -> None:
    """Be killed when the thread that started this process has ended, however it ends. Does nothing but on
    Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)


def gain_no_rights() -> None:
    """What this process runs gains no rights by setuid. Does nothing but on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
