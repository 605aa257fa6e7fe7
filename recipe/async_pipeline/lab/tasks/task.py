# SPDX-License-Identifier: Apache-2.0
"""The arithmetic: which sums exist, their prompts and their answers. Pure: no files, no tensors."""

from __future__ import annotations

import random
from dataclasses import dataclass

from recipe.async_pipeline.errors import ConfigError


@dataclass(frozen=True, order=True)
class Problem:
    """The sum of two non-negative integers."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """The prompt that the policy reads, for example `12+34=`."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The correct response, for example `46`."""
        return str(self.left + self.right)


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """The set of sums."""

    min_operand: int = 10
    """Smallest operand.

    If all operands have the same length, every prompt has the same shape, and a model of this size learns
    the sums from a few hundred batches instead of many thousand.
    """

    max_operand: int = 99
    """Largest operand."""

    num_val: int = 256
    """Sums held out for validation: neither warm-up nor RL trains on them."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_operand < self.max_operand:
            raise ConfigError(
                f"task operands must satisfy 0 <= min < max, got {self.min_operand}..{self.max_operand}"
            )
        if not 0 < self.num_val < self.num_problems:
            raise ConfigError(
                f"task num_val must be in 1..{self.num_problems - 1}, as there are {self.num_problems} sums "
                f"of operands {self.min_operand}..{self.max_operand}, got {self.num_val}"
            )

    @property
    def num_problems(self) -> int:
        """Number of different sums."""
        return (self.max_operand - self.min_operand + 1) ** 2


def careless_answer(problem: Problem, rng: random.Random, slip_rate: float) -> str:
    """Return the answer with each digit replaced by a random one with probability `slip_rate`."""
    return "".join(
        rng.choice("0123456789") if rng.random() < slip_rate else digit for digit in problem.answer
    )


@dataclass(frozen=True)
class Split:
    """All sums of a task, each in exactly one of two lists, shuffled by the seed."""

    train: tuple[Problem, ...]
    val: tuple[Problem, ...]


def split_problems(spec: TaskSpec, seed: int) -> Split:
    """Shuffle every sum of `spec` by `seed` and hold back the first `num_val`."""
    operands = range(spec.min_operand, spec.max_operand + 1)
    problems = [Problem(left, right) for left in operands for right in operands]
    random.Random(seed).shuffle(problems)
    return Split(train=tuple(problems[spec.num_val :]), val=tuple(problems[: spec.num_val]))
