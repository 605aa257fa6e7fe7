# SPDX-License-Identifier: Apache-2.0
"""The order of a strategy, also of a user's class that is not imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.tools.explain.strategy_order import order_of

SOURCE = """
import sys
sys.exit("this module must not be imported")
from recipe.async_pipeline.core.schedule import Schedule
from recipe.async_pipeline.strategies import FullyAsync

class Given(Schedule):
    order = "drawn"
class Annotated(FullyAsync):
    order: str = "drawn"
class Inherited(FullyAsync): ...
class Computed(Given):
    order = "dra" + "wn"
"""


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("on_policy", "in the order they were drawn"),
        ("fully_async", "in the order they finish"),
        ("mine_to_order:Given", "in the order they were drawn"),
        ("mine_to_order:Annotated", "in the order they were drawn"),
        ("mine_to_order:Inherited", "in the order they finish"),
        ("mine_to_order:Computed", "in a custom order"),
    ],
)
def test_the_order_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, order: str) -> None:
    (tmp_path / "mine_to_order.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert order_of(name) == order


def test_a_strategy_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError):
        order_of("no_such_module:Strategy")
