# SPDX-License-Identifier: Apache-2.0
"""A request has the noise of its place in the data, and the row of an image gets what training needs."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import Load
from tests.fakes.image_client import LATENTS, ROW, Client, loop_of

pytestmark = pytest.mark.real_engine


def drawn(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], *, trained: bool, seed: int = 1
) -> tuple[Any, dict[str, Any]]:
    client = Client()
    monkeypatch.setattr(module, "current_attempt", lambda: object() if trained else None)
    output = asyncio.run(loop_of(module, client, seed).run({}, session_id=0, **row))
    return output, client.asked[0]


def test_a_response_has_a_token_for_each_sde_step(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, asked = drawn(module, monkeypatch, ROW, trained=True)
    first = asked["window"][0]
    assert output.response_ids == [first, first + 1, first + 2] and output.response_mask == [1, 1, 1]
    assert output.response_logprobs == [-1.0] * 3 and output.prompt_ids == [3, 6]
    assert asked["prompt"] == "red square"

    fields = [{"extra_fields": output.extra_fields}]
    module.take_columns([output])
    module.add_columns(fields)
    assert fields[0]["latents"].tolist() == LATENTS.tolist()
    assert fields[0]["condition_pooled_projections"].tolist() == [1, 1, 1]
    assert "picture" not in fields[0]["extra_fields"] and "latents" not in fields[0]["extra_fields"]
    assert fields[0]["extra_fields"]["version_spans"] == [[7, 0]]


def test_pictures_that_are_scored_later_are_kept(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "current_attempt", object)
    output = asyncio.run(loop_of(module, Client(), at_once=False).run({}, session_id=0, **ROW))
    fields = [{"extra_fields": output.extra_fields}]
    module.take_columns([output])
    module.add_columns(fields)
    assert fields[0]["extra_fields"]["picture"].shape == (3, 2, 2)


@pytest.mark.parametrize(("count", "of_sessions"), [(0, [False, False]), (4, [True, False])])
def test_the_first_picture_of_a_prompt_is_kept_to_be_shown(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, count: int, of_sessions: list[bool]
) -> None:
    monkeypatch.setattr(module, "current_attempt", object)
    kept = []
    for session in range(2):
        loop = loop_of(module, Client(), kept_pictures=count)
        output = asyncio.run(loop.run({}, session_id=session, **ROW))
        fields = [{"extra_fields": output.extra_fields}]
        module.take_columns([output])
        module.add_columns(fields)
        assert module.KEPT not in fields[0]["extra_fields"]
        kept.append("picture" in fields[0]["extra_fields"])
    assert kept == of_sessions


def test_validation_has_no_noise_and_one_token(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    output, asked = drawn(module, monkeypatch, ROW, trained=False)
    assert asked["window"] is None
    assert (output.response_ids, output.response_mask, output.response_logprobs) == ([0], [1], [0.0])
    module.take_columns([output])
    fields = [{"extra_fields": output.extra_fields}]
    module.add_columns(fields)
    assert list(fields[0]) == ["extra_fields"]


def test_noise_follows_from_the_place_in_the_data(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(trained: bool = True, seed: int = 1, **changes: Any) -> dict[str, Any]:
        return drawn(module, monkeypatch, {**ROW, **changes}, trained=trained, seed=seed)[1]

    assert asked() == asked(uid="b"), "a uid is another one in each run"
    others = [asked(global_steps=4), asked(index=6), asked(seed=2), asked(trained=False)]
    assert len({one["seed"] for one in (asked(), *others)}) == 5


def test_samples_of_a_prompt_share_a_window(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "current_attempt", object)
    client = Client()
    loop = loop_of(module, client)
    for index in range(20):
        for session in range(4):
            asyncio.run(loop.run({}, **{**ROW, "index": index, "session_id": session}))
    windows = [tuple(one["window"]) for one in client.asked]
    assert all(len(set(windows[at : at + 4])) == 1 for at in range(0, 80, 4))
    assert {first for first, _ in windows} == {0, 1, 2}
    assert len({one["seed"] for one in client.asked}) == 80


def test_a_transcript_is_not_kept(module: ModuleType, monkeypatch: pytest.MonkeyPatch, load: Load) -> None:
    """An output that is recalled from one would have no latents."""
    partial = load("recipe.async_pipeline.verl_bridge.agent_loop.tokens.partial_rollouts")
    client = Client()
    monkeypatch.setattr(module, "current_attempt", object)
    recording = partial.RecordingClient(client, partial.Transcript())
    asyncio.run(loop_of(module, recording).run({}, session_id=0, **ROW))
    assert len(client.asked) == 1
