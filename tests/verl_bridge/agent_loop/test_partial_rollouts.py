# SPDX-License-Identifier: Apache-2.0
"""Recorded requests are kept with what engines have generated so far, and survive a file."""

from __future__ import annotations

import asyncio
import json
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.core.token_spans import spans_of
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module")
def rollouts(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.agent_loop.partial_rollouts")


class Server:
    """Has written one token of each request; `asked` counts the calls."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked = 0
        self.written = SimpleNamespace(remote=self._written)
        self._error = error

    async def _written(self, names: list[str]) -> dict[str, Any]:
        self.asked += 1
        if self._error is not None:
            raise self._error
        return {name: ([len(name)], [-0.25], [[2, 0]]) for name in names}


def open_at(rollouts: ModuleType, server: Any, name: str, before: Any = None) -> Any:
    return rollouts.Open([1, 2], before, lambda: (server, name))


def test_what_engines_have_written_belongs_to_it(rollouts: ModuleType) -> None:
    one, other, gone = Server(), Server(), Server(RuntimeError("dead"))
    transcript = rollouts.Transcript(
        [rollouts.RecordedRequest([9], [4], [-1.0], spans_of([[0, 0]]), "completed")]
    )
    begun = rollouts.RecordedRequest([1, 2], [7, 7], [-0.5, -0.5], spans_of([[1, 0]]), None)
    transcript.open = {
        "a": open_at(rollouts, one, "x"),
        "b": open_at(rollouts, one, "yy", begun),
        "c": open_at(rollouts, other, "zzz"),
        "d": open_at(rollouts, gone, "lost"),
        "e": open_at(rollouts, gone, "kept", begun),
        "f": rollouts.Open([1, 2], None, lambda: None),
    }
    found = asyncio.run(rollouts.written_so_far(list(transcript.open.values())))
    assert (one.asked, other.asked) == (1, 1), "each server once"
    assert [(list(s.token_ids), list(s.log_probs), tuple(s.spans)) for s in transcript.with_open(found)] == [
        ([1], [-0.25], spans_of([[2, 0]])),
        ([7, 7, 2], [-0.5, -0.5, -0.25], spans_of([[1, 0], [2, 2]])),
        ([3], [-0.25], spans_of([[2, 0]])),
        ([7, 7], [-0.5, -0.5], spans_of([[1, 0]])),
        ([4], [-1.0], spans_of([[0, 0]])),
    ], "and what was not requested again stays"


def test_tokens_of_unknown_likelihood_are_generated_again(rollouts: ModuleType) -> None:
    assert (
        open_at(rollouts, None, "x").with_written(rollouts.WrittenSoFar([5], None, spans_of([[2, 0]])))
        is None
    )
    assert open_at(rollouts, None, "x").with_written(rollouts.WrittenSoFar([], [], [])) is None


def test_a_prompt_is_recalled_once_and_only_if_it_is_the_same(rollouts: ModuleType) -> None:
    transcript = rollouts.Transcript(
        [rollouts.RecordedRequest([1], [n], [-1.0], spans_of([[0, 0]]), "completed") for n in (5, 6)]
    )
    assert transcript.recall([1, 1]) is None
    assert [transcript.recall([1]).token_ids for _ in range(2)] == [[5], [6]]
    assert transcript.replayed == 2
    assert transcript.recall([1]) is None


def test_a_response_that_is_generated_again_recalls_nothing(rollouts: ModuleType) -> None:
    said = rollouts.RecordedRequest([1], [5], [-1.0], spans_of([[0, 0]]), "completed")
    transcript = rollouts.Transcript([said])
    transcript.said.append(said)
    transcript.forget()
    assert transcript.recall([1]) is None and transcript.with_open({}) == []


@pytest.mark.parametrize(
    ("params", "left"),
    [
        ({}, {"max_tokens": 8}),
        ({"max_tokens": 3, "top_p": 1}, {"max_tokens": 1, "top_p": 1}),
        ({"max_new_tokens": 4, "min_tokens": 1}, {"max_tokens": 2, "min_tokens": 0}),
        ({"max_tokens": 2}, None),
    ],
)
def test_what_is_left_is_as_much_as_verls_server_would_have_allowed(
    rollouts: ModuleType, params: Any, left: Any
) -> None:
    two = rollouts.RecordedRequest([1, 1, 1], [5, 6], [-1.0, -1.0], spans_of([[0, 0]]), None)
    assert rollouts.continued(params, two, prompt_length=4, response_length=10) == left
    later_turn = two._replace(prompt_ids=[1] * 9)
    assert rollouts.continued({}, later_turn, prompt_length=4, response_length=10) == {"max_tokens": 3}, (
        "of the room for all turns"
    )


def test_in_a_file_and_back(rollouts: ModuleType) -> None:
    told = {
        "u": [
            [
                rollouts.RecordedRequest(
                    [1], [2, 3], [-0.5, -0.25], spans_of([[0, 0], [1, 1]]), None, "replica 1"
                )
            ],
            [],
        ]
    }
    assert rollouts.from_plain(json.loads(json.dumps(rollouts.as_plain(told)))) == told
    assert rollouts.tokens_in(told["u"]) == 2


def test_what_cannot_be_repeated_from_numbers_is_not_kept(rollouts: ModuleType) -> None:
    from verl.workers.rollout.replica import TokenOutput

    transcript = rollouts.Transcript()
    spans = {"version_spans": [[0, 0]]}
    for strange in (
        {"routed_experts": object(), "extra_fields": spans},
        {"stop_reason": "aborted", "extra_fields": spans},
        {},
    ):
        transcript.keep([1], TokenOutput(token_ids=[2], log_probs=[-1.0], **strange))
    assert transcript.said == []
    transcript.keep([1], TokenOutput(token_ids=[2], log_probs=[-1.0], extra_fields=spans))
    assert transcript.said == [
        rollouts.RecordedRequest([1], [2], [-1.0], spans_of([[0, 0]]), "completed", "")
    ]
