# SPDX-License-Identifier: Apache-2.0
"""A function of images gets the picture, the same by both ways to a reward worker."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipe.async_pipeline.errors import RewardError
from tests.conftest import Load

pytestmark = pytest.mark.real_engine
PICTURE = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
ROW = {
    "data_source": "squares",
    "reward_model": {"ground_truth": "red top left", "style": "rule"},
    "extra_info": {"index": 3},
}


@pytest.fixture
def responses(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.reward.responses")


def response_of(responses: ModuleType, **fields: Any) -> Any:
    extra = {"replica": "replica 0", **fields}
    return responses.Response([[1, 2]], [[0, 1, 2]], [2], [extra], dict(ROW))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("result", [0.5, {"score": 0.5, "colour": 1.0}])
async def test_both_ways_give_the_function_the_same(
    responses: ModuleType, is_async: bool, result: Any
) -> None:
    seen: list[dict[str, Any]] = []

    def function(**arguments: Any) -> Any:
        seen.append(arguments)
        return result

    async def awaited(**arguments: Any) -> Any:
        return function(**arguments)

    manager = responses.VisualRewardManager(SimpleNamespace(), None, awaited if is_async else function)
    response = response_of(responses, picture=PICTURE)
    direct, through_verl = [await manager.score(response), await manager.run_single(response.data())]
    info = result if isinstance(result, dict) else {"acc": 0.5}
    assert direct == through_verl == {"reward_score": 0.5, "reward_extra_info": info}
    for arguments in seen:
        assert np.array_equal(arguments["solution_image"], PICTURE)
        assert arguments["data_source"] == "squares" and arguments["ground_truth"] == "red top left"
        assert arguments["extra_info"]["index"] == 3 and arguments["extra_info"]["replica"] == "replica 0"
        assert "picture" not in arguments["extra_info"] and "solution_str" not in arguments


async def test_a_response_without_a_picture_is_an_error(responses: ModuleType) -> None:

    with pytest.raises(RewardError, match="a response without a picture"):
        manager = responses.VisualRewardManager(SimpleNamespace(), None, lambda **_: 1.0)
        await manager.score(response_of(responses))
