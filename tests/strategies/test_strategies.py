# SPDX-License-Identifier: Apache-2.0
"""The table of strategies, and classes that users name."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.strategies import STRATEGIES, FullyAsync, Schedule, load_class, schedule_class


class Trainer:
    """Stands for a subclass of the bridge's trainer."""

    schedule_class = FullyAsync


class TrainerWithoutSchedule:
    pass


def test_the_table() -> None:
    assert {name: (cls.implied_lag, cls.order) for name, cls in STRATEGIES.items()} == {
        "on_policy": (0, "drawn"),
        "one_step_off": (1, "drawn"),
        "n_step_ahead": (None, "drawn"),
        "fully_async": (None, "finished"),
    }
    for name, cls in STRATEGIES.items():
        assert load_class(name) is schedule_class(name) is cls


def test_a_class_of_the_user_is_a_schedule_or_names_one() -> None:
    assert schedule_class("recipe.async_pipeline.strategies:Schedule") is Schedule
    assert schedule_class("tests.strategies.test_strategies:Trainer") is FullyAsync


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:Mine", "cannot be imported"),
        ("tests.strategies.test_strategies:Mine", "cannot be imported"),
        ("tests.strategies.test_strategies:test_the_table", "must be a class, got function"),
        ("tests.strategies.test_strategies:TrainerWithoutSchedule", "must subclass"),
    ],
)
def test_what_is_no_strategy_is_one_line(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        schedule_class(name)
