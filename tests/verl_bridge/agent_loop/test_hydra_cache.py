# SPDX-License-Identifier: Apache-2.0
"""Factories give what hydra gives, without asking it each time."""

from __future__ import annotations

from typing import Any

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.async_pipeline.verl_bridge.agent_loop.hydra_cache import factory_of, hydra_with_factories


class Made:
    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Made) and other.arguments == self.arguments


HERE = f"{__name__}.Made"
CONFIGS: list[Any] = [
    {"_target_": HERE},
    {"_target_": HERE, "name": "x", "seed": 3, "nothing": None},
    OmegaConf.create(
        {"_target_": HERE, "episode": {"turns": 2, "lengths": [1, 2]}, "twice": "${episode.turns}"}
    ),
    {"_target_": HERE, "inner": {"_target_": HERE, "a": 1}},
    {"_target_": HERE, "inner": [{"_target_": HERE}]},
    {"_target_": HERE, "a": {"b": 1}, "_convert_": "all"},
    {"_target_": HERE, "_recursive_": False, "inner": {"_target_": HERE}},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_made_is_what_hydra_makes(config: Any) -> None:
    made, wanted = factory_of(config)(more=[1]), hydra.utils.instantiate(config, more=[1])
    assert made == wanted
    kinds = [{k: type(v) for k, v in one.arguments.items() if k != "more"} for one in (made, wanted)]
    assert kinds[0] == kinds[1]


def test_what_is_given_goes_before_what_the_config_says() -> None:
    assert factory_of({"_target_": HERE, "a": 1})(a=2).arguments == {"a": 2}


def test_a_config_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stands_for = hydra_with_factories(hydra)
    config = OmegaConf.create({"_target_": HERE, "a": {"b": 1}})
    first = stands_for.utils.instantiate(config=config, n=1)
    monkeypatch.setattr(hydra.utils, "get_object", lambda path: pytest.fail("resolved again"))
    second = stands_for.utils.instantiate(config=config, n=2)
    assert (first.arguments["n"], second.arguments["n"]) == (1, 2)
    assert isinstance(second.arguments["a"], DictConfig)


class Loop:
    def __init__(self, server_manager: Any, **arguments: Any) -> None:
        self.server_manager, self.arguments = server_manager, arguments
        self.rollout_config = OmegaConf.create({"prompt_length": 16})


class OtherLoop(Loop):
    """A user's loop, which may hold state of a response."""


def test_loops_of_a_class_without_state_are_copies() -> None:
    instantiate = hydra_with_factories(hydra, copied=Loop).utils.instantiate
    config, other = {"_target_": f"{__name__}.Loop"}, {"_target_": f"{__name__}.OtherLoop"}
    first, second = (instantiate(config=config, server_manager=n, tools=[n]) for n in (1, 2))
    assert type(first) is type(second) is Loop
    assert first is not second
    assert (first.server_manager, second.server_manager) == (1, 2)
    assert first.arguments is second.arguments
    assert second.rollout_config.prompt_length == 16

    third, fourth = (instantiate(config=other, server_manager=n, tools=[n]) for n in (1, 2))
    assert (third.arguments, fourth.arguments) == ({"tools": [1]}, {"tools": [2]})
    assert isinstance(fourth.rollout_config, DictConfig)
