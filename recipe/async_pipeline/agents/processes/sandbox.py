# SPDX-License-Identifier: Apache-2.0
"""What commands of agents do not see: other processes, and files of the run. `command_process` has the means.

A hidden folder is an empty one for the command, which is in memory and ends with it; a hidden file is empty.
What the command needs of them is there again, read-only, and so are its own folders, which it may write.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .commands import try_command

TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")
SECRETS = (
    "~/.ray",
    "~/.cache/huggingface",
    "~/.cache/verl",
    "~/.huggingface",
    "~/.ssh",
    "~/.aws",
    "~/.netrc",
)
"""Ray's token, with which anyone runs code in the cluster; keys of hubs and hosts; copies of data sets."""
SECRET_VARIABLES = ("RAY_AUTH_TOKEN_PATH", "HF_HOME", "HF_TOKEN_PATH", "HF_DATASETS_CACHE")
"""Variables that name further ones."""
TRY_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """What commands of a run do not see."""

    hidden: tuple[str, ...]
    """Absolute paths, without links."""
    offline: bool = False
    """Whether they have no network but the gateway."""

    @classmethod
    def of(cls, paths: Iterable[str | os.PathLike[str]], offline: bool = False) -> Sandbox:
        """Hide paths of a run, and what no command may read: temporary folders, and secrets of the user."""
        named = (os.environ[name] for name in SECRET_VARIABLES if os.environ.get(name))
        every = (*paths, *TEMPORARY, tempfile.gettempdir(), *SECRETS, *named)
        return cls(hidden=tuple(sorted({_real(path) for path in every} - {"/"})), offline=offline)

    def mounts(
        self,
        command: Sequence[str],
        writable: Iterable[Path],
        shown: Iterable[str] = (),
        gateway: str = "",
    ) -> dict[str, Sequence[str]]:
        """Return the mounts of a command; see `command_process.hide`.

        `writable`: its folders. `shown`: what it may read of the hidden, besides what it names. `gateway`:
        host:port, of which it has the port on 127.0.0.1 if it is offline.
        """
        mounts: dict[str, Sequence[str]] = {
            "hidden": self.hidden,
            "shown": [*shown, *self._needed(command)],
            "writable": [str(path) for path in writable],
        }
        return {**mounts, "gateway": gateway} if self.offline else mounts

    def _needed(self, command: Sequence[str]) -> list[str]:
        """Return which hidden paths a command needs: its virtual environment, and the folders of its files.

        Of a file that is right in a hidden folder it is the file only, and of a hidden folder nothing.
        """
        real, found = _real(command[0]), set()
        for program in (command[0], real):
            binaries, _ = os.path.split(program)
            found.add(os.path.dirname(binaries) if os.path.basename(binaries) == "bin" else binaries)
        for word in (*command, real):
            if os.path.isabs(word) and os.path.exists(word):
                folder = word if os.path.isdir(word) else os.path.dirname(word)
                if _real(folder) not in self.hidden:
                    found.add(folder)
                elif folder != word:
                    found.add(word)
        return sorted(one for one in found if self._is_below_hidden(_real(one)))

    def _is_below_hidden(self, path: str) -> bool:
        return any(path.startswith(f"{hidden}{os.sep}") for hidden in self.hidden)


@functools.cache
def reason_without(offline: bool = False) -> str:
    """Return why this machine has no sandbox, or nothing if it has. The first call tries it, and blocks."""
    if sys.platform != "linux":
        return f"{platform.system()} has no namespaces"
    command = ["/bin/true"]
    try:
        finished = try_command(command, Sandbox.of((), offline).mounts(command, ()), TRY_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if finished.status == 0 else finished.describe()


def _real(path: str | os.PathLike[str]) -> str:
    return os.path.realpath(os.path.expanduser(path))
