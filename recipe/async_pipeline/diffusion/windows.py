# SPDX-License-Identifier: Apache-2.0
"""Which denoising steps are stochastic. Only these have a log-prob and are trained; the others are ODE steps.

Flow-GRPO-Fast trains a few steps of each sample, from a random place at high noise. It costs a fraction of
training all steps and learns as well.

A window belongs to a prompt group: all samples of a group are compared with each other, and the advantage of
one with an early window over one with a late window would measure the window. Implementations draw it for
each call or for each sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import ConfigError


def seed_of(*parts: int | str) -> int:
    """Return a seed of 63 bits that follows from the parts, such as the run's seed, a prompt and an index."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stream(*parts: int | str) -> torch.Generator:
    """Return a random stream for a sample, so that an image does not depend on its neighbours in a batch.

    Streams are drawn on the CPU: an accelerator would give other numbers for the same seed.
    """
    return torch.Generator().manual_seed(seed_of(*parts))


@dataclass(frozen=True)
class SdeWindow:
    """The SDE steps `start` to `start + size - 1` of a sample, counted from 0."""

    start: int
    size: int

    @property
    def steps(self) -> range:
        return range(self.start, self.start + self.size)


class Windows(Protocol):
    """How the window of a prompt group is chosen."""

    def of(self, group: int, update: int) -> SdeWindow:
        """Return the window of a group with this seed that is generated for this optimizer step."""


@dataclass(frozen=True, kw_only=True)
class EveryStep:
    """All steps but the last one: Flow-GRPO. The last one has next to no noise, and for cps none."""

    num_steps: int

    def __post_init__(self) -> None:
        _check(self.num_steps - 1, (0, self.num_steps - 1), self.num_steps)

    def of(self, group: int, update: int) -> SdeWindow:
        return SdeWindow(0, self.num_steps - 1)


@dataclass(frozen=True, kw_only=True)
class RandomWindow:
    """A window of `size` steps, at random within [first, end) for each group: Flow-GRPO-Fast."""

    size: int
    first: int
    end: int
    num_steps: int

    def __post_init__(self) -> None:
        _check(self.size, (self.first, self.end), self.num_steps)

    def of(self, group: int, update: int) -> SdeWindow:
        draw = torch.randint(self.first, self.end - self.size + 1, (1,), generator=stream("window", group))
        return SdeWindow(int(draw), self.size)


def windows(num_steps: int, size: int | None, within: Sequence[int] | None) -> Windows:
    """Return the windows of `sde_window_size` and `sde_window_range`; a size of None trains every step.

    Raises ConfigError if no window fits.
    """
    if size is None:
        return EveryStep(num_steps=num_steps)
    bounds = (0, num_steps - 1) if within is None else tuple(within)
    if len(bounds) != 2:
        raise ConfigError(f"sde_window_range must be [first, end], got {list(bounds)}")
    return RandomWindow(size=size, first=bounds[0], end=bounds[1], num_steps=num_steps)


def _check(size: int, within: tuple[int, int], num_steps: int) -> None:
    first, end = within
    if not (size >= 1 and 0 <= first and first + size <= end <= num_steps - 1):
        raise ConfigError(
            f"an SDE window of {size} steps does not fit into [{first}, {end}) of {num_steps} steps; it must "
            f"be at least 1, inside the range, and end before the last step (end <= {num_steps - 1})"
        )
