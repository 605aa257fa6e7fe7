# SPDX-License-Identifier: Apache-2.0
"""Sums with a calculator that costs: short ones the model can learn to do itself, long ones it cannot.

    12+34=             46             answered directly
    1234+5678=         [1234+5678]    a call; the tool answers 6912>
                       6912           and this is the answer

Pure: no files, no tensors.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from recipe.async_pipeline.lab.tasks.task import Problem

CALL = re.compile(r"\[([0-9]{1,9})\+([0-9]{1,9})\]")
"""A call of the tool: the whole turn."""
RESULT_END = ">"
"""Ends what the tool returns."""
COST = 0.2
"""What a call takes off the score of an episode.

Larger than the share of short sums that the policy gets wrong, so that asking for these does not pay.
"""


@dataclass(frozen=True, kw_only=True)
class CalculatorTask:
    """The set of sums."""

    short_digits: int = 2
    """Digits of the operands of one half of the sums."""
    long_digits: int = 4
    """Digits of the operands of the other half."""
    num_train: int = 3000
    num_val: int = 128

    def problems(self, seed: int) -> tuple[list[Problem], list[Problem]]:
        """Return sums to train on and held-out ones, none in both; every second one is long."""
        rng = random.Random(seed)
        found: dict[Problem, None] = {}
        while len(found) < self.num_train + self.num_val:
            digits = self.long_digits if len(found) % 2 else self.short_digits
            low, high = 10 ** (digits - 1), 10**digits - 1
            found.setdefault(Problem(rng.randint(low, high), rng.randint(low, high)))
        every = list(found)
        return every[self.num_val :], every[: self.num_val]

    def is_long(self, problem: Problem) -> bool:
        """Return whether the model needs the tool."""
        return len(str(problem.left)) >= self.long_digits


def call_of(problem: Problem) -> str:
    """Return the turn that has the tool do a sum."""
    return f"[{problem.left}+{problem.right}]"


def result_of(left: int, right: int) -> str:
    """Return what the tool answers."""
    return f"{left + right}{RESULT_END}"


@dataclass(frozen=True)
class Demonstration:
    """What the teacher writes to a sum: with or without a call, and an answer."""

    calls: bool
    answer: str


class CalculatorTeacher:
    """Knows sums and when to ask, and errs on purpose."""

    def __init__(self, task: CalculatorTask, ask_rate: float = 0.5) -> None:
        self._task, self._ask_rate = task, ask_rate

    def show(self, problem: Problem, rng: random.Random, slip_rate: float) -> Demonstration:
        """Return a demonstration; each digit of an answer is a random one with probability `slip_rate`.

        Without slips, it asks for exactly the long sums; with slips, for any sum at `ask_rate`, and guesses
        the other long ones.
        """
        calls = rng.random() < self._ask_rate if slip_rate else self._task.is_long(problem)
        answer = problem.answer
        if not calls and self._task.is_long(problem):
            return Demonstration(False, "".join(rng.choice("0123456789") for _ in answer))
        slipped = (rng.choice("0123456789") if rng.random() < slip_rate else digit for digit in answer)
        return Demonstration(calls, "".join(slipped))
