# SPDX-License-Identifier: Apache-2.0
"""An environment is found by its name, and what it returns is checked."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.agents.environment import BUILT_IN, EnvironmentSpec, Player, Step, checked_step
from recipe.async_pipeline.errors import ConfigError, EnvironmentFailed
from tests.fakes.environments import AWAITING, COUNTING, Counting


def test_an_environment_is_found_by_module_and_class() -> None:
    made = EnvironmentSpec(name="tests.fakes.environments:Counting", kwargs={"start": 3}).make()
    assert isinstance(made, Counting) and made.start == 3


@pytest.mark.parametrize("name", ["tests.fakes.environments:Other", "no_module_has_this_name:Class"])
def test_a_wrong_name_is_an_error_with_a_remedy(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"{name}.*write frozen_lake, module:Class, http://HOST:PORT or .*, or an id of gymnasium",
    ):
        EnvironmentSpec(name=name).make()


def test_names_of_this_package_and_of_gymnasium() -> None:
    pytest.importorskip("gymnasium")
    for name in (*BUILT_IN, "CliffWalking-v1"):
        made = EnvironmentSpec(name=name).make()
        assert isinstance(made.reset(1), str)
        made.close()


@pytest.mark.parametrize("spec", [COUNTING, AWAITING], ids=["functions", "coroutines"])
async def test_a_player_plays_episodes_one_after_another(spec: EnvironmentSpec) -> None:
    player = Player(spec)
    assert await player.reset(7, {"hint": "go"}) == "seed 7 episode 1 go"
    assert await player.step("a") == Step("a 1", 0.5)
    assert await player.step("stop") == Step("stop 2", 0.5, over=True)
    assert await player.reset(8, {}) == "seed 8 episode 2"
    await player.close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise", "step: RuntimeError: in a step"),
        ("exit", "step: SystemExit: 3"),
        ("nonsense", "must return a Step"),
        ("nan", "must be a finite number"),
        ("number", "must be a text, or a list of texts and of files of pictures"),
    ],
)
async def test_a_step_that_fails_has_one_error(text: str, why: str) -> None:
    player = Player(COUNTING)
    await player.reset(1, {})
    with pytest.raises(EnvironmentFailed, match=why):
        await player.step(text)


async def test_an_environment_that_cannot_be_made_or_reset_has_failed() -> None:
    with pytest.raises(EnvironmentFailed, match="reset: ValueError: no such task"):
        await Player(COUNTING).reset(1, {"raises": True})
    missing = Player(EnvironmentSpec(name="tests.fakes.environments:Other"))
    with pytest.raises(EnvironmentFailed, match="reset: ConfigError: the environment"):
        await missing.reset(1, {})
    await missing.close()


@pytest.mark.parametrize(
    ("found", "step"),
    [
        (("x",), Step("x")),
        (["x", 1], Step("x", 1.0)),
        (("x", "0.5", 1, 0), Step("x", 0.5, True, False)),
        (Step("x", 2.0, True, True), Step("x", 2.0, True, True)),
    ],
)
def test_a_step_may_be_any_sequence(found: Any, step: Step) -> None:
    assert checked_step(found) == step
    assert type(checked_step(found).reward) is float


@pytest.mark.parametrize(
    "found", [None, "text", (), ("a", 1, 1, 1, 1), (1,), ("a", None), ("a", "x"), ("a", float("inf"))]
)
def test_anything_else_is_no_step(found: Any) -> None:
    with pytest.raises(EnvironmentFailed, match=r"step must return|must be a text|finite number"):
        checked_step(found)
