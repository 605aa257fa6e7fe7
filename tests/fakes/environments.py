# SPDX-License-Identifier: Apache-2.0
"""Environments for tests: one that counts, and ones that fail in the ways that environments do."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import Any

from PIL import Image

from recipe.async_pipeline.agents.environment import EnvironmentSpec, Step, png


class Counting:
    """Shows its seed and the number of steps; `stop` ends an episode, and other texts do as they say.

    `pictures`: it also shows this many pictures each time; the text `broken` makes one of them unreadable.
    """

    def __init__(self, *, start: int = 0, pictures: int = 0) -> None:
        self.start, self.count, self.episodes, self.pictures = start, 0, 0, pictures
        self.child: subprocess.Popen[bytes] | None = None

    def reset(self, seed: int, **task: Any) -> Any:
        if task.get("raises"):
            raise ValueError("no such task")
        if task.get("hangs"):
            time.sleep(1000)
        self.count, self.episodes = self.start, self.episodes + 1
        if task.get("silent"):
            return ""
        return self.shown(f"seed {seed} episode {self.episodes} {task.get('hint', '')}".strip())

    def shown(self, text: str) -> Any:
        """Return an observation."""
        if not self.pictures:
            return text
        files = [png(Image.new("RGB", (56, 56 * (1 + at)), "red")) for at in range(self.pictures)]
        return [text, *files] if "broken" not in text else [text, b"broken"]

    def step(self, text: str) -> Any:
        self.count += 1
        sys.stdout.write("an environment may print\n")
        if text == "raise":
            raise RuntimeError("in a step")
        if text == "exit":
            sys.exit(3)
        if text == "cancel":
            raise asyncio.CancelledError("by itself")
        if text == "die":
            os._exit(4)
        if text == "hang":
            time.sleep(1000)
        if text in ("fork", "daemon"):
            self.child = subprocess.Popen(["sleep", "1000"], start_new_session=text == "daemon")
            return Step(f"{os.getpid()} {self.child.pid}")
        if text == "nonsense":
            return {"observation": "x"}
        if text == "number":
            return Step([3])
        if text == "nan":
            return Step("x", float("nan"))
        return Step(self.shown(f"{text} {self.count}"), 0.5, over=text == "stop")

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()


class Awaiting(Counting):
    """The same with coroutines; `hang` never returns."""

    async def reset(self, seed: int, **task: Any) -> Any:
        await asyncio.sleep(0)
        return Counting.reset(self, seed, **task)

    async def step(self, text: str) -> Any:
        await asyncio.sleep(0)
        if text == "hang":
            await asyncio.get_running_loop().create_future()
        return Counting.step(self, text)


COUNTING = EnvironmentSpec(name="tests.fakes.environments:Counting")
AWAITING = EnvironmentSpec(name="tests.fakes.environments:Awaiting")
