# SPDX-License-Identifier: Apache-2.0
"""Environments of whole jobs: one that fails, each kind of failure once for each board that is meant to fail
and each hang once in all, one that a slow program plays, and one that is slow itself.
"""

from __future__ import annotations

import base64
import os
import time
from pathlib import Path
from typing import Any

from recipe.async_pipeline.agents.environment import Step
from recipe.async_pipeline.agents.frozen_lake import FrozenLake
from recipe.async_pipeline.agents.runners import Policy
from recipe.async_pipeline.lab.soak import lake_agent

SEEN: dict[str, Any] = {"size": 3, "pictures": True, "invalid": "continue"}
KINDS = ("reset_raises", "reset_hangs", "step_raises", "step_hangs", "dies", "exits")
HANGS = ("reset_hangs", "step_hangs")
"""Each takes as long as an environment may take to answer, which includes its start on a busy machine."""
ONE_IN = 8
"""Boards whose seed modulo this is the index of a kind fail, the others do not."""
SLOW_S = 1.0
"""Seconds before each turn but the first, of the slow program and in the slow environment."""


class FailingLake(FrozenLake):
    """The first episode on a board that gets there fails; the others, and its next attempt, do not."""

    def __init__(self, *, marks: str, **kwargs: Any) -> None:
        """`marks`: a folder with one file for each failure."""
        super().__init__(**kwargs)
        self._marks, self._seed = Path(marks), 0

    def reset(self, seed: int, **task: Any) -> Any:
        self._seed = seed
        if self._fails("reset_raises"):
            raise RuntimeError("no such board")
        if self._fails("reset_hangs"):
            time.sleep(1000)
        return super().reset(seed, **task)

    def step(self, text: str) -> Step:
        if self._fails("step_raises"):
            raise RuntimeError("the ice is gone")
        if self._fails("step_hangs"):
            time.sleep(1000)
        if self._fails("dies"):
            os._exit(1)
        if self._fails("exits"):
            raise SystemExit(3)
        return super().step(text)

    def _fails(self, kind: str) -> bool:
        if self._seed % ONE_IN != KINDS.index(kind):
            return False
        board = "any" if kind in HANGS else self._seed
        try:
            (self._marks / f"{kind}-{board}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class SlowLake(FrozenLake):
    """Takes its time for each step."""

    def step(self, text: str) -> Step:
        time.sleep(SLOW_S)
        return super().step(text)


class _SlowPolicy(lake_agent.PolicyChat):
    def ask(self, messages: lake_agent.Messages, attempt: int = 0) -> str:
        if len(messages) > 1:
            time.sleep(SLOW_S)
        return super().ask(messages, attempt)


def play_slowly(task: dict[str, Any], policy: Policy) -> float:
    """Play an episode over HTTP, with a wait before each turn but the first."""
    slow = _SlowPolicy(policy.base_url, policy.api_key)
    return lake_agent.play(task, slow, Path("no control file"), is_bad=False)


def play_seeing(task: dict[str, Any], policy: Policy) -> float:
    """Play one episode of three turns, each of which shows a picture of the board; return its reward."""
    chat, lake = lake_agent.PolicyChat(policy.base_url, policy.api_key), FrozenLake(**SEEN)
    shown, messages = lake.reset(int(task["seed"])), []
    for _ in range(3):
        file, text = shown
        url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
        picture = {"type": "image_url", "image_url": {"url": url}}
        messages.append({"role": "user", "content": [picture, {"type": "text", "text": text}]})
        said = chat.ask(messages)
        messages.append({"role": "assistant", "content": said})
        step = lake.step(said)
        if step.over:
            return step.reward
        shown = step.observation
    return 0.0
