# SPDX-License-Identifier: Apache-2.0
"""FrozenLake for a tiny model: which boards exist, and a teacher that knows the shortest ways."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipe.async_pipeline.agents.frozen_lake import ACTIONS, MOVES, FrozenLake, LakeMap

Place = tuple[int, int]
FIRST_VAL_SEED = 1 << 20
"""Seeds of held-out boards begin here."""


@dataclass(frozen=True, kw_only=True)
class LakeTask:
    """The set of boards, and the length of an episode."""

    size: int = 4
    """Rows and columns."""

    frozen: float = 0.8
    """Probability of ice."""

    max_turns: int = 8
    """Turns of an episode; the shortest way on a board of 4 takes 6."""

    num_train: int = 1500
    """Boards to train on."""

    num_val: int = 128
    """Boards held out for validation: neither warm-up nor RL trains on their seeds."""

    def make(self) -> FrozenLake:
        """Return an environment of this task."""
        return FrozenLake(**self.kwargs)

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments of the environment, as `agentic.environment_kwargs` has them."""
        return {"size": self.size, "frozen": self.frozen}

    def seeds(self, seed: int) -> tuple[range, range]:
        """Return the seeds of the boards to train on and of the held-out ones."""
        first = seed * self.num_train
        held_out = FIRST_VAL_SEED + seed * self.num_val
        return range(first, first + self.num_train), range(held_out, held_out + self.num_val)


def best_actions(board: LakeMap) -> Mapping[Place, str]:
    """Return for each place from which the goal can be reached the actions of the shortest ways to it."""
    rows, columns = len(board), len(board[0])
    goal = next((r, c) for r in range(rows) for c in range(columns) if board[r][c] == "G")
    distance, queue = {goal: 0}, deque([goal])
    while queue:
        place = queue.popleft()
        for down, right in MOVES:
            near = row, column = place[0] + down, place[1] + right
            inside = 0 <= row < rows and 0 <= column < columns
            if inside and board[row][column] != "H" and near not in distance:
                distance[near] = distance[place] + 1
                queue.append(near)
    return {
        (row, column): "".join(
            action
            for action, (down, right) in zip(ACTIONS, MOVES, strict=True)
            if distance.get((row + down, column + right), away) < away
        )
        for (row, column), away in distance.items()
        if away
    }


@dataclass(frozen=True)
class Shown:
    """An episode of the teacher: the first observation, and each action with what followed it."""

    first: str
    turns: tuple[tuple[str, str], ...]
    """Letter and next observation; the last one is empty."""


class Teacher:
    """Plays boards on a shortest way, and errs on purpose. Remembers the ways of each board."""

    def __init__(self, task: LakeTask) -> None:
        self._task, self._lake = task, task.make()
        self._ways: dict[int, Mapping[Place, str]] = {}

    def show(self, seed: int, rng: random.Random, slip_rate: float) -> Shown:
        """Play the board of a seed; each action is a random one with probability `slip_rate`."""
        first = self._lake.reset(seed)
        ways = self._ways.setdefault(seed, best_actions(self._lake.board))
        place: Place = (0, 0)
        turns: list[tuple[str, str]] = []
        while len(turns) < self._task.max_turns:
            action = rng.choice(ACTIONS if rng.random() < slip_rate else ways[place])
            step = self._lake.step(action)
            last = step.over or len(turns) + 1 == self._task.max_turns
            turns.append((action, "" if last else step.observation))
            if step.over:
                break
            place = self._lake.player
        return Shown(first, tuple(turns))
