# SPDX-License-Identifier: Apache-2.0
"""Responses from verl's agent loops: which flaws are noted, which responses pass, and their scores."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import RayTaskError

from recipe.async_pipeline.core.groups.bad_data import Flaw, Policies
from recipe.async_pipeline.core.groups.items import spans_of
from recipe.async_pipeline.core.groups.scores import Score
from recipe.async_pipeline.errors import BadDataError, RewardError
from recipe.async_pipeline.verl_bridge.agent_loop.tokens.version_spans import ResponseTurn
from tests.conftest import Load

pytestmark = pytest.mark.real_engine
TURNS = [
    ResponseTurn(4, spans_of([(3, 0), (4, 2)]), "replica 0"),
    ResponseTurn(9, spans_of([(4, 0)]), "replica 1"),
]


@pytest.fixture
def checks_module(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.agent_loop.sample_checks")


def checks(checks_module: ModuleType, **policies: Any) -> Any:
    return checks_module.Checks(Policies(**policies).by_kind("fail"), 8)


def output(load: Load, *, prompt: int = 4, answer: int = 3, logprobs: list[float] | None = None) -> Any:
    module = load("verl.experimental.agent_loop.agent_loop")
    return module.AgentLoopOutput(
        prompt_ids=[1] * prompt,
        response_ids=[2] * answer,
        response_mask=[1] * answer,
        response_logprobs=logprobs,
        metrics={},
    )


def noted(checks_module: ModuleType, checks: Any, one: Any) -> tuple[bool, list[Flaw]]:
    flaws: list[Flaw] = []
    with checks_module.found_flaws(flaws):
        return checks.passes("u_0_0", one, TURNS), flaws


def test_a_sound_answer_passes(checks_module: ModuleType, load: Load) -> None:
    assert noted(checks_module, checks(checks_module), output(load, logprobs=[-1.0, -2.0, -3.0])) == (
        True,
        [],
    )


@pytest.mark.parametrize(
    ("token", "writer"),
    [(0, "replica 0 with version 3"), (2, "replica 0 with version 4"), (5, "replica 1 with version 4")],
)
def test_a_log_prob_that_is_none_is_put_down_to_who_wrote_the_token(
    checks_module: ModuleType, load: Load, token: int, writer: str
) -> None:
    logprobs = [-1.0] * 6
    logprobs[token] = float("nan")
    passes, (flaw,) = noted(checks_module, checks(checks_module), output(load, answer=6, logprobs=logprobs))
    assert not passes
    assert (flaw.kind, flaw.writer) == ("nonfinite_logprobs", writer)


@pytest.mark.parametrize(
    ("prompt", "response", "pictures", "places"),
    [
        ([1, 9, 9, 9, 1, 9, 9], [2], 2, None),
        ([1, 9, 9], [2], 0, 1),
        ([1], [2, 9, 2], 0, 1),
        ([1, 9, 9], [2, 9], 1, 2),
        ([1], [2], 1, 0),
    ],
    ids=["two pictures", "text of a row", "text of the policy", "both", "a picture without a place"],
)
def test_a_place_of_a_picture_without_one_is_a_flaw(
    checks_module: ModuleType, load: Load, prompt: list[int], response: list[int], pictures: int, places: Any
) -> None:
    """verl and the trained model would end the run with an error that names no row."""
    made = checks_module.Checks(Policies().by_kind("fail"), 8, {"images": 9, "videos": 8})
    one = output(load)
    one.prompt_ids, one.response_ids = prompt, response
    one.multi_modal_data = {"images": ["picture"] * pictures} if pictures else None
    passes, flaws = noted(checks_module, made, one)
    why = f"the text of response u_0_0 has {places} places for images, of which there are {pictures}"
    assert (passes, [(flaw.kind, flaw.why) for flaw in flaws]) == (
        (True, []) if places is None else (False, [("unusable_prompt", why)])
    )


def test_a_turn_that_does_not_say_who_it_was(checks_module: ModuleType, load: Load) -> None:
    flaws: list[Flaw] = []
    with checks_module.found_flaws(flaws):
        assert not checks(checks_module).passes("u_0_0", output(load, answer=0, logprobs=[]), [])
    assert flaws == [Flaw("empty_answer", "response u_0_0 has no token")]


def test_in_validation_all_pass(checks_module: ModuleType, load: Load) -> None:
    assert checks(checks_module).passes("u_0_0", output(load, answer=0), TURNS)


@pytest.mark.parametrize(("policy", "left"), [("drop", None), ("keep", list(range(2, 10)))])
def test_a_prompt_that_is_too_long_is_refused_or_cut_where_training_asks_for_it(
    checks_module: ModuleType, load: Load, policy: str, left: list[int] | None
) -> None:
    base = load("verl.experimental.agent_loop.agent_loop").AgentLoopBase
    refusing = checks(checks_module, long_prompt=policy).refusing_long_prompts(base._cap_text_prompt_length)
    loop = SimpleNamespace(rollout_config=SimpleNamespace(prompt_length=8))
    assert refusing(loop, list(range(10))) == list(range(2, 10)), "validation goes verl's way"
    flaws: list[Flaw] = []
    got = None
    with checks_module.found_flaws(flaws):
        assert refusing(loop, [1, 2]) == [1, 2]
        got = refusing(loop, list(range(10)))
    assert got == left
    assert [flaw.kind for flaw in flaws] == ["long_prompt"]


class Seeing:
    """An agent loop of a model that takes pictures, at most two in a prompt."""

    processor = object()
    rollout_config: Mapping[str, Any] = {"limit_images": 2}


async def read(loop: Any, pictures: Any) -> Any:
    if not isinstance(pictures, list):
        raise OSError(f"{pictures} is\ntruncated")
    return {"images": pictures or None}


@pytest.mark.parametrize(
    ("pictures", "why"),
    [
        ("a.png", "OSError: a.png is truncated"),
        ([1, 2, 3], "BadDataError: it has 3 pictures, and rollout.limit_images is 2"),
    ],
)
async def test_pictures_that_the_model_cannot_be_shown_are_a_flaw_of_the_prompt(
    checks_module: ModuleType, pictures: Any, why: str
) -> None:
    """And no failure of the episode, which would be repeated."""
    refusing, flaws = checks(checks_module).refusing_pictures(read), list[Flaw]()
    with checks_module.found_flaws(flaws):
        assert await refusing(Seeing(), []) == {"images": None}
        assert await refusing(Seeing(), [1, 2]) == {"images": [1, 2]}
        assert flaws == []
        await refusing(Seeing(), pictures)
    assert flaws == [Flaw("unusable_prompt", f"the prompt cannot be shown to the model: {why}")]
    with pytest.raises((OSError, BadDataError)):
        await refusing(Seeing(), pictures)  # in validation


async def test_a_model_of_text_keeps_its_errors(checks_module: ModuleType) -> None:
    refusing, flaws = checks(checks_module).refusing_unusable_prompts(read), list[Flaw]()
    with pytest.raises(OSError, match="truncated"), checks_module.found_flaws(flaws):
        await refusing(SimpleNamespace(processor=None), "a template")
    assert flaws == []


async def test_a_prompt_that_is_too_long_stays_one(checks_module: ModuleType) -> None:
    async def build(loop: Any, tokens: list[int]) -> list[int]:
        made: list[int] = cut(loop, tokens)
        return made

    every = checks(checks_module)
    cut, flaws = every.refusing_long_prompts(lambda loop, tokens: tokens), list[Flaw]()
    with checks_module.found_flaws(flaws):
        await every.refusing_unusable_prompts(build)(Seeing(), [1] * 9)
    assert [flaw.kind for flaw in flaws] == ["long_prompt"]


def test_other_errors_of_an_agent_loop_pass_through(checks_module: ModuleType) -> None:
    with pytest.raises(ValueError, match="mine"), checks_module.found_flaws([]):
        raise ValueError("mine")


async def test_answers_that_are_written_at_once_keep_their_flaws_apart(
    checks_module: ModuleType, load: Load
) -> None:
    async def write(flaws: list[Flaw], answer: int) -> None:
        with checks_module.found_flaws(flaws):
            await asyncio.sleep(0)
            checks(checks_module).passes(f"u_{answer}_0", output(load, answer=answer), TURNS)

    flaws: list[list[Flaw]] = [[], []]
    await asyncio.gather(*(asyncio.create_task(write(flaws[i], i)) for i in range(2)))
    first, second = flaws
    assert [flaw.kind for flaw in first] == ["empty_answer"]
    assert second == []


def stored(session: int, mask: list[int], why: str = "") -> dict[str, Any]:
    return {
        "session_id": session,
        "response_mask": torch.tensor(mask),
        "extra_fields": {"reward_extra_info": {"unscored": why}},
    }


def test_a_group_is_looked_at_as_a_whole(checks_module: ModuleType) -> None:
    flaw = Flaw("empty_answer", "x")
    assert checks_module.flaws_together(2, [[], []], [stored(0, [1]), stored(1, [0])]) == []
    assert checks_module.flaws_together(2, [[], [flaw]], [stored(0, [1])]) == [flaw], (
        "it is not missing besides"
    )
    assert [f.kind for f in checks_module.flaws_together(3, [[], [flaw], []], [stored(0, [1])])] == [
        "empty_answer",
        "missing_answers",
    ]
    assert [f.kind for f in checks_module.flaws_together(2, [[], []], [stored(0, [0]), stored(1, [0])])] == [
        "all_masked"
    ]
    assert checks_module.flaws_together(1, [[]], [stored(0, [1]), stored(0, [1])]) == [], (
        "several outputs of one answer"
    )
    assert checks_module.flaws_together(1, [[]], [stored(0, [1], "died")]) == [Flaw("no_score", "died")]


# Scores.


def scored(score: Any, info: dict[str, Any] | None = None) -> Any:
    return SimpleNamespace(
        reward_score=score, extra_fields={} if info is None else {"reward_extra_info": info}
    )


@pytest.mark.parametrize("score", [None, float("nan"), float("-inf"), "1", 1e39, np.complex64(1)])
def test_a_score_that_is_none_ends_the_run(checks_module: ModuleType, score: Any) -> None:
    with pytest.raises(RewardError, match="the score must be a finite number, got"):
        checks_module.Scores("fail", 0.0).settle(scored(score))


@pytest.mark.parametrize(
    "score", [np.float32(0.5), np.array(0.5), Fraction(1, 2), Decimal("0.5"), torch.tensor([0.5])]
)
def test_a_score_of_another_library_becomes_a_float(checks_module: ModuleType, score: Any) -> None:
    one = scored(score)
    checks_module.Scores("fail", 0.0).settle(one)
    assert one.reward_score == 0.5 and type(one.reward_score) is float


def test_a_score_that_is_one_is_left_alone(checks_module: ModuleType) -> None:
    one = scored(1.0)
    checks_module.Scores("fail", 0.0).settle(one)
    assert one.extra_fields == {}


@pytest.mark.parametrize("on_failure", ["drop", "score"])
def test_an_answer_without_a_score_gets_the_default_and_looks_like_the_others(
    checks_module: ModuleType, on_failure: str
) -> None:
    scores = checks_module.Scores(on_failure, -1.0)
    good, bad, died = scored(1.0, {"acc": 1.0}), scored(float("nan"), {}), scored(None)
    scores.settle(good)
    scores.settle(bad)
    scores.settle(died, Score(None, "raised: ValueError: x"))
    assert good.extra_fields == {"reward_extra_info": {"acc": 1.0, "unscored": ""}}
    assert (bad.reward_score, died.reward_score) == (-1.0, -1.0)
    assert died.extra_fields["reward_extra_info"] == {"acc": -1.0, "unscored": "raised: ValueError: x"}
    assert (
        bad.extra_fields["reward_extra_info"]["unscored"]
        == "invalid: the score must be a finite number, got nan"
    )


def test_the_reason_of_a_guard_stays(checks_module: ModuleType) -> None:
    one = scored(-1.0, {"acc": -1.0, "unscored": "timeout: x"})
    checks_module.Scores("drop", -1.0).settle(one)
    assert one.extra_fields["reward_extra_info"]["unscored"] == "timeout: x"


def test_a_call_that_failed_ends_the_run_or_is_put_in_words(checks_module: ModuleType) -> None:
    error = RayTaskError("compute_score", "traceback", ValueError("no such rule\nand more"))
    with pytest.raises(RayTaskError):
        checks_module.Scores("fail", 0.0).failed(error)
    assert checks_module.Scores("drop", 0.0).failed(error) == (None, "raised: ValueError: no such rule")
