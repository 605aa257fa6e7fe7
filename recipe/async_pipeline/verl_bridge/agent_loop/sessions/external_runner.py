# SPDX-License-Identifier: Apache-2.0
"""Runners outside of the run: they find each gateway by a file, claim tasks, and report rewards.

runners_dir/gateway-HOST-PID.json   {"url": ..., "key": ...}, readable for the user of the run only

The file is removed when the run ends; after a kill, by the next gateway on its host that uses the folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from contextlib import nullcontext
from pathlib import Path

from ....agents.processes.commands import LeftBehind, OutputLog
from ....agents.processes.sandbox import Folder
from ....agents.runners import Policy, Task, reward_of
from ....errors import AgentFailed
from ....gateway.claims import ClaimLost, Claims
from ..episodes.episode import current_attempt


class ExternalRunner:
    """Offers each episode to the runners; see `agents.runners.Runner`."""

    def __init__(self, claims: Claims) -> None:
        self._claims, self.left = claims, LeftBehind()

    async def run(
        self, task: Task, policy: Policy, folder: Folder, log: OutputLog | None = None
    ) -> float | None:
        """Return the reward that a runner reports. Raises AgentFailed if the runner fails or is gone."""
        reached = {name: value for name, value in policy._asdict().items() if value is not None}
        offer = await self._claims.offer({**task.shown, **reached})
        attempt = current_attempt()
        try:
            # The wait for a runner is not the episode's.
            with nullcontext() if attempt is None else attempt.excused():
                await offer.claimed
            return reward_of(await offer.ended, AgentFailed)
        except ClaimLost as error:
            raise AgentFailed(str(error)) from error
        finally:
            self._claims.withdraw(offer)


class AddressFile:
    """The file by which runners find the gateway of this process."""

    def __init__(self, folder: str) -> None:
        self._folder, self._host = Path(folder).expanduser(), f"gateway-{socket.gethostname()}-"
        self._file = self._folder / f"{self._host}{os.getpid()}.json"

    async def write(self, url: str, key: str) -> None:
        """Write it. Raises OSError."""
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._write, {"url": url, "key": key})
        except OSError as error:
            raise OSError(
                f"cannot write the gateway's address for runners: {error}; correct gateway.runners_dir"
            ) from error

    def remove(self) -> None:
        """Remove it. Idempotent."""
        self._file.unlink(missing_ok=True)

    def _write(self, content: dict[str, str]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for other in self._folder.glob(f"{self._host}*.json"):
            owner = other.stem.removeprefix(self._host)
            # Of host `node`, and not of host `node-1`.
            if owner.isdecimal() and not Path("/proc", owner).exists():
                other.unlink(missing_ok=True)
        new = self._file.with_suffix(".new")
        new.unlink(missing_ok=True)
        # The key is in it.
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(content, file)
        new.replace(self._file)
