# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a trajectory are too old for the step that trains it.

With the straggler policy `mask`, a step does not wait for an unfinished group, and a later step trains it
with the tokens masked that are older than `max_lag` by then. A trajectory keeps its spans; `masked_before`
tells which of them are left out:

    spans             (4, 0)      (5, 30)     (6, 70)           version, position of its first token
    masked_before 6   |  masked   |  masked   |  trained  |
                      0           30          70          100

Versions of a response may also decrease, because its next turn may be on another replica, so whole spans are
masked, wherever they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from ..groups.items import Group, Trajectory


class AgedTokens(NamedTuple):
    """Tokens of a response that one version wrote, with the tokens of tools behind them."""

    version: int
    start: int
    end: int


def written(one: Trajectory) -> Iterator[AgedTokens]:
    """Yield what each version wrote. With unknown spans, all of it counts as written by the oldest one."""
    spans = one.spans or ((one.first_version, 0),)
    for (version, start), (_, following) in pairwise((*spans, (0, one.num_tokens))):
        end = min(following, one.num_tokens)
        if start < end:
            yield AgedTokens(version, start, end)


def oldest_trained(one: Trajectory) -> int | None:
    """Return the oldest version of which tokens are trained, or None if all tokens are masked."""
    if not one.masked_before:
        return one.first_version
    return min((w.version for w in written(one) if w.version >= one.masked_before), default=None)


def oldest_in(trajectories: Iterable[Trajectory]) -> int | None:
    """Return the oldest version of which tokens are trained, or None if all tokens are masked."""
    found = [version for one in trajectories if (version := oldest_trained(one)) is not None]
    return min(found, default=None)


def newest(group: Group) -> int:
    """Return the newest version that wrote a token of the group."""
    return max((w.version for one in group.trajectories for w in written(one)), default=group.first_version)


def masked(one: Trajectory) -> list[tuple[int, int]]:
    """Return start and end of the tokens that are too old."""
    return [(w.start, w.end) for w in written(one) if w.version < one.masked_before]


def with_masks(group: Group, before: int) -> Group:
    """Return the group with all tokens masked that a version before `before` wrote."""
    if group.first_version >= before:
        return group
    trajectories = (
        replace(one, masked_before=before) if one.first_version < before else one
        for one in group.trajectories
    )
    return replace(group, trajectories=tuple(trajectories))
