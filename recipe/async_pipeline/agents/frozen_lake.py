# SPDX-License-Identifier: Apache-2.0
"""gymnasium's FrozenLake as text or pictures: cross the ice to the goal without falling into a hole.

The first observation is the board and what is next to the player, each further one only the latter, in the
order of the actions Left, Down, Right, Up:

    P...          P  the player
    .O..          .  ice
    ...O          O  a hole, which ends the episode without a reward
    O..G          G  the goal, which ends it with the reward 1
    #..#>         #  the edge: an action towards it does nothing

With `pictures`, each observation is a picture of the board and a `>` instead.

The policy answers with one letter of LDRU; any other text is invalid and ends the episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ..errors import ConfigError
from .environment import squares
from .gym_environment import GymEnvironment

ACTIONS = "LDRU"
"""Letters of the actions, in the order of their numbers in gymnasium."""
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Change of row and column by each action."""
SHOWN = {"S": ".", "F": ".", "H": "O", "G": "G"}
"""gymnasium's letters of the board, and the letters of the text."""
PROMPT_END = ">"
"""Ends each observation."""
TILE = 28
"""Pixels of a tile's side, for which Qwen's vision towers have one token."""
COLOURS = {".": "white", "O": "black", "G": "green", "P": "red"}
LakeMap = tuple[str, ...]


class FrozenLake(GymEnvironment):
    """A random board for each seed, or the `board` of the task."""

    def __init__(
        self,
        *,
        size: int = 4,
        frozen: float = 0.8,
        slippery: bool = False,
        pictures: bool = False,
        success_rate: float | None = None,
        reward_schedule: Sequence[float] | None = None,
        invalid: Literal["end", "continue"] = "end",
        invalid_reward: float = 0.0,
    ) -> None:
        """`size`: rows and columns; `frozen`: probability of ice; `slippery`: the player may slide.

        `success_rate` and `reward_schedule` are gymnasium's. Raises ConfigError if there are no such boards.
        """
        # gymnasium would search for such boards without an end.
        if isinstance(size, bool) or not isinstance(size, int) or size < 2:
            raise ConfigError(f"size must be a whole number >= 2, got {size!r}; 4 is the default")
        if isinstance(frozen, bool) or not isinstance(frozen, int | float) or not 0 < frozen <= 1:
            raise ConfigError(f"frozen must be a probability above 0, got {frozen!r}; 0.8 is the default")

        self._size, self._frozen, self._drawn = size, frozen, pictures
        self.board: LakeMap = ()
        options: dict[str, Any] = {"success_rate": success_rate, "reward_schedule": reward_schedule}
        super().__init__(
            "FrozenLake-v1",
            invalid=invalid,
            invalid_reward=invalid_reward,
            is_slippery=slippery,
            max_episode_steps=-1,  # the run bounds the turns of an episode
            **{name: value for name, value in options.items() if value is not None},
        )

    def reset(self, seed: int, **task: Any) -> Any:
        """Begin an episode. `task` may have a `board` of gymnasium's letters, a text for each row."""
        board = task.pop("board", None)
        self.board = tuple(board) if board else board_of(seed, self._size, self._frozen)
        self.environment = self.make(desc=list(self.board))
        return super().reset(seed, **task)

    def first(self, observation: Any) -> Any:
        """Return the board with the player on it, and what is next to the player."""
        seen = self.render(observation)
        board = "\n".join("".join(letters) for letters in self._rows(observation))
        return f"{board}\n{seen}" if isinstance(seen, str) else seen

    def render(self, observation: Any) -> Any:
        """Return what is next to the player, in the order of the actions, or a picture of the board."""
        if self._drawn:
            return [
                squares([[COLOURS[one] for one in row] for row in self._rows(observation)], TILE),
                PROMPT_END,
            ]
        row, column = self.place(observation)
        return "".join(self._at(row + down, column + right) for down, right in MOVES) + PROMPT_END

    def parse(self, text: str) -> int | None:
        """Return the number of the action, or None if the text is not one of its letters."""
        return ACTIONS.index(text) if len(text) == 1 and text in ACTIONS else None

    @property
    def player(self) -> tuple[int, int]:
        """Row and column of the player."""
        return self.place(self.observed)

    def place(self, observation: Any) -> tuple[int, int]:
        """Return row and column that an observation of gymnasium stands for."""
        return divmod(int(observation), len(self.board[0]))

    def _rows(self, observation: Any) -> list[list[str]]:
        """Return the letters of the board with the player on it."""
        rows = [[SHOWN[letter] for letter in row] for row in self.board]
        row, column = self.place(observation)
        rows[row][column] = "P"
        return rows

    def _at(self, row: int, column: int) -> str:
        inside = 0 <= row < len(self.board) and 0 <= column < len(self.board[0])
        return SHOWN[self.board[row][column]] if inside else "#"


def board_of(seed: int, size: int = 4, frozen: float = 0.8) -> LakeMap:
    """Return the random board of a seed, on which the goal can be reached."""
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    return tuple(generate_random_map(size=size, p=frozen, seed=seed))
