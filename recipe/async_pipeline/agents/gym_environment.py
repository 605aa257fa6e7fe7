# SPDX-License-Identifier: Apache-2.0
"""Environments of gymnasium as text or pictures. Their package is imported late."""

from __future__ import annotations

import re
from typing import Any, Literal

from ..errors import ConfigError
from .environment import Step, png

NUMBER = re.compile(r"-?[0-9]{1,18}")
"""An action; more digits do not fit into the 64 bits of gymnasium's numbers."""
MISSING = "gymnasium is not installed; pip install async_pipeline[agentic]"


class GymEnvironment:
    """An environment of gymnasium whose actions are numbers (Discrete) or texts (Text).

    Observations are shown as Python prints them, or as gymnasium draws the environment. A subclass with
    `render` and `parse` shows them better.
    """

    def __init__(
        self,
        id: str,
        *,
        pictures: bool = False,
        invalid: Literal["end", "continue"] = "end",
        invalid_reward: float = 0.0,
        **kwargs: Any,
    ) -> None:
        """`id` and further arguments are passed to `gymnasium.make`. `pictures`: show what it draws.

        A text that is no action gets `invalid_reward`, and ends the episode or leaves it as it is. Raises
        ConfigError if gymnasium does not have the environment, or if its actions are of another kind.
        """
        if invalid not in ("end", "continue"):
            raise ConfigError(f"invalid must be end or continue, got {invalid!r}; end is the default")
        self._invalid, self._invalid_reward = invalid, invalid_reward
        self._pictures = pictures
        self._id, self._kwargs = id, {**kwargs, **({"render_mode": "rgb_array"} if pictures else {})}
        self.environment = self.make()
        self.observed: Any = None
        """The last observation of gymnasium."""

    def make(self, **more: Any) -> Any:
        """Return a new environment of gymnasium. Raises as the constructor."""
        try:
            import gymnasium
        except ModuleNotFoundError as error:
            raise ConfigError(MISSING) from error

        try:
            made: Any = gymnasium.make(self._id, disable_env_checker=True, **{**self._kwargs, **more})
        except gymnasium.error.Error as error:
            raise ConfigError(f"gymnasium cannot make {self._id!r}: {error}") from error
        kind = type(made.action_space).__name__
        if kind not in ("Discrete", "Text"):
            raise ConfigError(
                f"the actions of {self._id} must be Discrete or Text, got {kind}; write a TextEnvironment"
            )
        return made

    def reset(self, seed: int, **task: Any) -> Any:
        """Begin an episode; `task` holds gymnasium's options."""
        self.observed, _ = self.environment.reset(seed=seed, options=task or None)
        return self.first(self.observed)

    def step(self, text: str) -> Step:
        """Do the action that the text names."""
        action = self.parse(text)
        if action is None:
            over = self._invalid == "end"
            return Step(self.render(self.observed), self._invalid_reward, over, invalid=True)
        self.observed, reward, terminated, truncated, _ = self.environment.step(action)
        return Step(self.render(self.observed), float(reward), bool(terminated or truncated))

    def close(self) -> None:
        """Close gymnasium's environment."""
        self.environment.close()

    def first(self, observation: Any) -> Any:
        """Return what the policy reads, or sees, first."""
        return self.render(observation)

    def render(self, observation: Any) -> Any:
        """Return an observation for the policy."""
        return [png(self.environment.render())] if self._pictures else str(observation)

    def parse(self, text: str) -> Any | None:
        """Return the action that a text names, or None."""
        space, said = self.environment.action_space, text.strip()
        if type(space).__name__ == "Text":
            return said if said in space else None
        if NUMBER.fullmatch(said) is None:
            return None
        return int(said) if int(said) in space else None
