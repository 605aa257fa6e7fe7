# SPDX-License-Identifier: Apache-2.0
"""Rewards of single turns of a session, and where in its response each belongs. Pure.

turn 1      turn 2      turn 3       turns count from 1, in the order of their answers
▲           ▲           ▲
0.1         -           0.5          each at the last token that the policy wrote in its turn
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import RequestRefused
from .chains import ChainRow


class _Place(NamedTuple):
    start: int
    """The first token of an answer in its conversation."""
    end: int
    """The token after its last one."""


class TurnRewards:
    """The rewards that the holder of the control key gave to turns. The last one of a turn counts."""

    def __init__(self, *, allowed: bool) -> None:
        """`allowed`: whether the run has rewards of turns (`agentic.turn_rewards`)."""
        self._allowed = allowed
        self.rewards: dict[int, float] = {}
        self._places: list[_Place] = []
        self._numbers: dict[str, int] = {}

    def answered(self, name: str, start: int, end: int) -> None:
        """Note a turn: the id of its answer, if it has one, and its tokens' positions in its conversation."""
        self._places.append(_Place(start, end))
        if name:
            self._numbers[name] = len(self._places)

    def give(self, turn: int | str, reward: float) -> None:
        """Set the reward of a turn, given its number or the id of its answer, as the API wrote it.

        Raises RequestRefused if turns have no rewards, if there is no such turn, or if the policy wrote
        nothing in it.
        """
        if not self._allowed:
            raise RequestRefused(
                "a reward of a turn requires agentic.turn_rewards=True; leave turn out for the reward of the "
                "episode",
                status=422,
            )
        count = len(self._places)
        if isinstance(turn, int):
            number: int | None = turn
        else:
            # APIs put a prefix before the id.
            number = self._numbers.get(turn.replace("_", "-").rpartition("-")[2])
        if number is None or not 1 <= number <= count:
            known = f"a number from 1 to {count}, or the id of an answer" if count else "left out"
            raise RequestRefused(
                f"turn must be {known}, got {turn!r}; the session has {count} answers", status=422
            )
        place = self._places[number - 1]
        if place.start == place.end:
            raise RequestRefused(
                f"turn {number} has no token that a reward could be given to; give it to another turn",
                status=422,
            )
        self.rewards[number] = reward

    def placed(self, row: ChainRow, last: float | None) -> list[tuple[int, float]]:
        """Return the position in the response, and the reward, of each turn that has one; then `last`, the
        reward of the episode, at the end. Empty without rewards of turns that are trained.

        `row`: the conversation of all turns.
        """
        if not self.rewards:
            return []
        start, mask, found = len(row.prompt_ids), row.mask, []
        for number, reward in sorted(self.rewards.items()):
            at = self._places[number - 1].end - 1 - start
            if at >= len(mask):
                # No client has received the answer, so it is not trained.
                continue
            # The end token of an answer may have been replaced when the conversation was continued.
            while at > 0 and not mask[at]:
                at -= 1
            found.append((at, reward))
        if last is not None:
            found.append((len(mask) - 1 - mask[::-1].index(1), last))
        return found
