# SPDX-License-Identifier: Apache-2.0
"""A reward function gets the arguments, and the agent loop the result, of verl's reward manager `naive`."""

from __future__ import annotations

import asyncio
import copy
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.conftest import Load

pytestmark = pytest.mark.real_engine

ROW = {
    "raw_prompt": [{"role": "user", "content": "1+1="}],
    "data_source": "addition",
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 3},
    "index": 3,
}
ROWS = [
    ROW,
    {**ROW, "reward_scores": {"judge": 0.5}},
    {name: value for name, value in ROW.items() if name != "extra_info"},
]


class Tokenizer:
    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        return f"{[int(one) for one in ids]} {skip_special_tokens}"


@pytest.fixture
def responses(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.reward.responses")


def scored(scoring: ModuleType, response: Any, result: Any, *, is_async: bool, router: str | None) -> Any:
    """Return for verl and for this package: result, arguments of the function, and their types."""
    found = []
    for ours in (False, True):
        seen: list[Any] = []

        def function(seen: list[Any] = seen, **arguments: Any) -> Any:
            types = {name: type(value) for name, value in arguments["extra_info"].items()}
            seen.append((arguments, {name: type(value) for name, value in arguments.items()}, types))
            return result

        async def awaited(function: Any = function, **arguments: Any) -> Any:
            return function(**arguments)

        async def run(function: Any = awaited if is_async else function, ours: bool = ours) -> Any:
            given = copy.deepcopy(response)
            manager = scoring.NaiveRewardManager(
                SimpleNamespace(), Tokenizer(), function, router, "tokenizer"
            )
            score = scoring.scorer_of(manager)
            return await (score(given) if ours else manager.run_single(given.data()))

        found.append((asyncio.run(run()), seen))
    return found


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("result", "ids", "router"),
    [(0.5, [4, 5, 6], None), ({"score": 1, "acc": 0.2}, [7], "host:1"), (0.0, [], None)],
)
def test_the_score_is_the_managers(
    responses: ModuleType, row: Any, is_async: bool, result: Any, ids: Any, router: Any
) -> None:
    response = responses.Response([[1, 2]], [ids], [2], [{"turn_scores": [], "session": 1}], row)
    stock, ours = scored(responses, response, result, is_async=is_async, router=router)
    assert ours == stock


def test_long_responses_of_an_async_function_are_decoded_in_a_thread(
    responses: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "SHORT", 2)
    response = responses.Response([[1, 2]], [[3, 4, 5]], [2], [{}], ROW)
    stock, ours = scored(responses, response, 0.5, is_async=True, router=None)
    assert ours == stock


def test_other_managers_get_their_data(responses: ModuleType) -> None:

    class Custom(responses.NaiveRewardManager):  # type: ignore[name-defined, misc]
        """A user's manager."""

    async def scorer_of(manager: Any) -> Any:
        return responses.scorer_of(manager(SimpleNamespace(), Tokenizer(), lambda **_: 0.5))

    assert asyncio.run(scorer_of(Custom)) is None
    assert asyncio.run(scorer_of(responses.NaiveRewardManager)) is not None
