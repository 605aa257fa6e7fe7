# SPDX-License-Identifier: Apache-2.0
"""Any environment of gymnasium with numbered actions can be played in text."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from recipe.async_pipeline.agents.environment import Step
from recipe.async_pipeline.agents.gym_environment import GymEnvironment
from recipe.async_pipeline.errors import ConfigError

gymnasium = pytest.importorskip("gymnasium")
CLIFF, UP = "CliffWalking-v1", "0"


def test_a_seed_begins_the_same_episode() -> None:
    taxi = GymEnvironment("Taxi-v4" if _has("Taxi-v4") else "Taxi-v3")
    first = [taxi.reset(seed) for seed in (1, 2, 3, 4, 5)]
    assert [taxi.reset(seed) for seed in (1, 2, 3, 4, 5)] == first and len(set(first)) > 1


def _has(name: str) -> bool:
    import gymnasium

    return name in gymnasium.registry


def test_actions_are_numbers() -> None:
    cliff = GymEnvironment(CLIFF)
    assert cliff.reset(1) == "36"
    assert cliff.step(f" {UP}\n") == Step("24", -1.0)
    cliff.close()


class Drawn(gymnasium.Env):  # type: ignore[misc,name-defined]
    """Counts its steps, and draws them as so many columns."""

    metadata = {"render_modes": ["rgb_array"]}
    action_space, observation_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(9)

    def __init__(self, render_mode: str) -> None:
        self.render_mode, self.count = render_mode, 0

    def reset(self, **_: Any) -> tuple[int, dict[str, Any]]:
        self.count = 1
        return 1, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self.count, 0.0, False, False, {}

    def render(self) -> Any:
        return np.zeros((2, self.count, 3), np.uint8)


def test_what_gymnasium_draws_is_shown() -> None:
    gymnasium.register("Drawn-v0", Drawn)
    try:
        drawn = GymEnvironment("Drawn-v0", pictures=True)
        files = [*drawn.reset(1), *drawn.step("1").observation]
    finally:
        del gymnasium.registry["Drawn-v0"]
    assert [Image.open(io.BytesIO(file)).size for file in files] == [(1, 2), (2, 2)]


@pytest.mark.parametrize("text", ["", "up", "4", "-1", "1.0", "²", "1 2", "--3", "-", "9" * 19, "1" * 5000])
@pytest.mark.parametrize(("invalid", "over"), [("end", True), ("continue", False)])
def test_any_other_text_is_invalid(text: str, invalid: Any, over: bool) -> None:
    cliff = GymEnvironment(CLIFF, invalid=invalid, invalid_reward=-0.5)
    cliff.reset(1)
    assert cliff.step(text) == Step("36", -0.5, over, invalid=True)
    assert cliff.step(UP).observation == "24", "it did not move"


def test_an_episode_is_over_when_gymnasium_ends_or_truncates_it() -> None:
    cliff = GymEnvironment(CLIFF, max_episode_steps=2)
    cliff.reset(1)
    assert [cliff.step(UP).over for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"id": "NoSuchEnvironment-v0"}, "gymnasium cannot make 'NoSuchEnvironment-v0'"),
        ({"id": "Pendulum-v1"}, "must be Discrete or Text, got Box"),
        ({"id": CLIFF, "invalid": "ignore"}, "invalid must be end or continue"),
    ],
)
def test_one_that_cannot_be_played_is_refused(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        GymEnvironment(**arguments)
