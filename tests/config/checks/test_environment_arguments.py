# SPDX-License-Identifier: Apache-2.0
"""A misspelled environment, or argument of one, is one line that names the key and what may be meant."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.config.checks.environment_arguments import (
    OWN_IDS,
    Arguments,
    arguments_in_source,
    built_in_arguments,
    check_environment,
)
from recipe.async_pipeline.config.knobs.agentic import AgenticConfig
from recipe.async_pipeline.errors import ConfigError

SOURCE = """
import sys
sys.exit("this module must not be imported")

class Environment:
    def step(self, text): ...
    def close(self): ...

class Bare(Environment):
    def __init__(self): ...
    def reset(self, seed, **task): ...

class Room(Environment):
    def __init__(self, width, *, height, door=None): ...
"""
METHODS = """
    async def reset(self, seed, board, *, depth, **task): ...
    def step(self, text): ...
    close = None
"""


def check(environment: str, **kwargs: Any) -> None:
    check_environment(AgenticConfig(environment=environment, environment_kwargs=kwargs or None))


def refusal(environment: str, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(environment, **kwargs)
    line = str(caught.value)
    assert line.startswith("trainer.v1.async_pipeline.agentic.environment") and "\n" not in line
    return line


def test_no_environment_is_nothing_to_check() -> None:
    check_environment(AgenticConfig())


@pytest.fixture
def rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rooms_to_find.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("rooms")
def test_arguments_of_a_custom_class_are_read_in_its_source() -> None:
    check("rooms_to_find:Bare")
    check("rooms_to_find:Room", width=1, height=2, door="left")
    assert (
        "environment_kwargs.heihgt must be an argument of rooms_to_find:Room, got 2 (did you mean "
        in refusal("rooms_to_find:Room", width=1, heihgt=2)
    )
    assert "environment_kwargs.height must be set, because rooms_to_find:Room" in refusal(
        "rooms_to_find:Room", width=1
    )
    assert refusal("rooms_to_find:Bare", width=1).endswith(
        "got 1; it has none; correct it, or remove the arguments of the configuration by "
        "trainer.v1.async_pipeline.agentic.environment_kwargs=null"
    )
    assert "does not define (did you mean 'Room'?)" in refusal("rooms_to_find:Rom")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class C: ...", Arguments(())),
        ("class C(B): ...", None),
        ("class C(metaclass=M): ...", None),
        ("@dataclass\nclass C:\n  a: int", None),
        ("class C:\n  @wrap\n  def __init__(self, a): ...", None),
        ("class C:\n  def __new__(cls): ...\n  def __init__(self, a): ...", None),
        ("class C(B):\n  def __init__(self, a, b=1, *, c, d=2): ...", Arguments((*"abcd",), (*"ac",))),
        ("class C:\n  def __init__(self, /, a): ...", Arguments(("a",), ("a",))),
        ("class C:\n  def __init__(self, *, a=1, **more): ...", Arguments(("a",), (), others=True)),
    ],
)
def test_what_a_source_shows(source: str, found: Arguments | None) -> None:
    (cls,) = ast.parse(source).body
    assert isinstance(cls, ast.ClassDef)
    assert arguments_in_source(cls) == found


def test_other_arguments_may_be_passed_on(rooms: None, tmp_path: Path) -> None:
    source = f"class C:\n    def __init__(self, **more): ...{METHODS}"
    (tmp_path / "open_rooms.py").write_text(source, encoding="utf-8")
    check("open_rooms:C", anything=1)


@pytest.mark.parametrize(
    ("was", "now", "why"),
    [
        ("    def step(self, text): ...", "", "a class with the method step, which it lacks; write it"),
        ("    close = None", "", "a class with the method close, which it lacks; write it"),
        (
            "self, seed, board, *, depth, **task",
            "self",
            "reset that can be called with the seed, but its ",
        ),
        (
            "self, text",
            "self",
            "step that can be called with the text of the policy, but its ",
        ),
        ("close = None", "def close(self, now): ...", "close that can be called without arguments, but its"),
    ],
)
def test_a_custom_class_has_the_methods(rooms: None, tmp_path: Path, was: str, now: str, why: str) -> None:
    methods = METHODS.replace(was, now)
    (tmp_path / "lacking_rooms.py").write_text(f"class C:{methods}", encoding="utf-8")
    assert why in refusal("lacking_rooms:C")


def test_the_arguments_of_built_in_environments() -> None:
    own = ("size", "frozen", "slippery", "pictures", "success_rate", "reward_schedule")
    of_any = ("invalid", "invalid_reward")
    assert built_in_arguments("frozen_lake") == own + of_any
    assert built_in_arguments("CliffWalking-v1") == ("pictures", *of_any)


class TestOfGymnasium:
    """Ids and arguments of gymnasium's environments."""

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("gymnasium")

    @pytest.mark.parametrize(
        ("name", "kwargs"),
        [
            ("frozen_lake", {"size": 5, "slippery": True, "invalid": "continue"}),
            ("CliffWalking-v1", {"is_slippery": True, "invalid_reward": -1.0}),
            ("CliffWalking", {}),
            ("frozen_lake", {"pictures": True}),
            ("frozen_lake", {"success_rate": 0.5, "reward_schedule": [2, 0, 0], "frozen": 1}),
        ],
    )
    def test_what_can_be_made(self, name: str, kwargs: dict[str, Any]) -> None:
        check(name, **kwargs)

    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("frozen_lak", "frozen_lake"),
            ("Frozen_Lake", "frozen_lake"),
            ("CliffWalkng-v1", "CliffWalking-v1"),
            ("FrozenLake-v7", "FrozenLake-v1"),
        ],
    )
    def test_an_id_that_does_not_exist(self, name: str, meant: str) -> None:
        assert f"or an id of gymnasium, got {name!r} (did you mean {meant!r}?); correct it" in refusal(name)

    def test_an_argument_that_does_not_exist(self) -> None:
        assert "got 5 (did you mean 'size'?); it has size, frozen, " in refusal("frozen_lake", sizze=5)
        assert "(did you mean 'is_slippery'?)" in refusal("CliffWalking-v1", is_slipery=True)

    @pytest.mark.parametrize(
        ("name", "kwargs", "why"),
        [
            ("frozen_lake", {"invalid": "ends"}, "(invalid must be end or continue, got 'ends'"),
            ("frozen_lake", {"size": "four"}, "size must be a whole number >= 2, got 'four'"),
            ("frozen_lake", {"size": 1}, "size must be a whole number >= 2, got 1"),
            ("frozen_lake", {"frozen": 8}, "frozen must be a probability above 0, got 8"),
            ("frozen_lake", {"frozen": 0}, "frozen must be a probability above 0, got 0"),
            ("Pendulum-v1", {}, "must be Discrete or Text, got Box"),
        ],
    )
    def test_what_cannot_be_made(self, name: str, kwargs: dict[str, Any], why: str) -> None:
        line = refusal(name, **kwargs)
        assert why in line and line.endswith("; correct them")

    @pytest.mark.parametrize("name", ["is_slippery", "max_episode_steps", "desc", "map_name"])
    def test_what_frozen_lake_sets_itself_is_no_argument(self, name: str) -> None:
        assert f"environment_kwargs.{name} must be an argument of frozen_lake" in refusal(
            "frozen_lake", **{name: 1}
        )

    def test_a_package_that_is_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """gymnasium raises no ImportError then."""
        import gymnasium
        from gymnasium.envs.registration import EnvSpec

        spec = EnvSpec("Lacking-v0", entry_point=f"{OWN_IDS}lacking_a_package:Lacking")
        monkeypatch.setitem(gymnasium.registry, "Lacking-v0", spec)
        folder, *_ = gymnasium.__path__
        source = "from gymnasium.error import DependencyNotInstalled\nraise DependencyNotInstalled('none')"
        monkeypatch.setattr(gymnasium, "__path__", [folder, str(tmp_path)])
        (tmp_path / "lacking_a_package.py").write_text(source, encoding="utf-8")
        line = refusal("Lacking-v0")
        assert "cannot be imported (DependencyNotInstalled: none); install what it requires" in line

    def test_environments_of_other_packages_are_not_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import gymnasium
        from gymnasium.envs.registration import EnvSpec

        spec = EnvSpec("Elsewhere-v0", entry_point="no_such_package:Elsewhere")
        monkeypatch.setitem(gymnasium.registry, "Elsewhere-v0", spec)
        check("Elsewhere-v0", anything=1)


def test_a_server_of_openenv_needs_the_names_of_its_fields() -> None:
    fields = {"action": "message", "observation": "echoed_message"}
    check("ws://127.0.0.1:8000", **fields)
    check("https://host/space", **fields, invalid="continue", invalid_reward=-1.0)
    assert "environment_kwargs.action must be set" in refusal("ws://127.0.0.1:8000", observation="x")
    assert "did you mean 'observation'" in refusal("ws://127.0.0.1:8000", **fields, obsrvation="x")
    assert "must read ws://HOST:PORT, got 'ftp://host'" in refusal("ftp://host", **fields)
    assert "invalid must be end or continue" in refusal("ws://127.0.0.1:8000", **fields, invalid="ignore")
