# SPDX-License-Identifier: Apache-2.0
"""Begin more episodes than a group needs, and end the rest when enough have finished.

    n + r sessions ─► the first n that finish soundly ─► the group
                      the rest: cancelled, or finished in the same moment ─► Redundant, for the bias metrics

What finishes first is short, so the trained episodes are a biased sample; `observe.samples.selection_bias`
measures by how much.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ....agents.episodes import REDUNDANT
from ....core.groups.bad_data import Flaw
from ....core.groups.items import Trajectory
from ....observe.run_directory.agent_output import FailedAttempt
from ..tokens.version_spans import ResponseTurn

if TYPE_CHECKING:
    from ..tokens.partial_rollouts import Transcript

END_S = 10.0
"""Seconds that redundant episodes get to end."""


class Redundant(NamedTuple):
    """What is known of an episode that its group did not need; None where nothing is.

    Of one that was cancelled, these are lower bounds.
    """

    tokens: int | None
    turns: int | None
    seconds: float
    reward: float | None = None

    @classmethod
    def finished(cls, trajectories: Sequence[Trajectory], seconds: float) -> Redundant:
        """Return it for an episode with these responses, of which the last one has the score."""
        tokens = sum(one.num_tokens for one in trajectories)
        turns = [one.turns for one in trajectories if one.turns is not None]
        return cls(tokens, sum(turns) if turns else None, seconds, trajectories[-1].reward)

    @classmethod
    def cancelled(cls, turns: Sequence[ResponseTurn], seconds: float) -> Redundant:
        """Return it for an episode that had finished these turns and was in the next one."""
        tokens = turns[-1].prompt_tokens + turns[-1].tokens - turns[0].prompt_tokens if turns else None
        return cls(tokens, len(turns) + 1, seconds)


class Begun:
    """An episode of a group while it is played."""

    def __init__(self, transcript: Transcript | None = None) -> None:
        """`transcript`: records its requests."""
        self.transcript = transcript
        self.since = time.perf_counter()
        self.flaws: list[Flaw] = []
        self.turns: Sequence[ResponseTurn] = ()
        """Finished turns of the current attempt; the list grows."""
        self.failed: list[FailedAttempt] = []
        """Attempts that failed."""

    @property
    def seconds(self) -> float:
        """Seconds since the episode, with all of its attempts, began."""
        return time.perf_counter() - self.since


async def first_sound(
    sessions: Sequence[asyncio.Task[Any]], needed: int, is_sound: Callable[[int], bool]
) -> list[int] | None:
    """Wait until `needed` sessions have finished soundly; then cancel the others, and wait until they ended.

    Returns the numbers of the first sound ones, in the order in which they finished, or None if a session
    raised or too few are sound: then all have ended by themselves. A session that does not react to its
    cancellation within `END_S` is left behind. If the caller is cancelled, so are the sessions.
    """
    number = {session: i for i, session in enumerate(sessions)}
    waiting, found, failed = set(sessions), list[int](), False
    try:
        while waiting and (failed or len(found) < needed):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            ended = sorted(number[one] for one in done)
            failed = failed or any(sessions[i].cancelled() or sessions[i].exception() for i in ended)
            found += [i for i in ended if is_sound(i)]
    finally:
        # Otherwise the caller is cancelled, with its whole group.
        message = None if len(found) < needed else REDUNDANT
        for session in waiting:
            session.cancel(message)
        if waiting:
            await asyncio.wait(waiting, timeout=END_S)
    return None if failed or len(found) < needed else found[:needed]
