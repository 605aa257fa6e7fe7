# SPDX-License-Identifier: Apache-2.0
"""A request has the noise of its place in the data, and the row of an image gets what training needs."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest

from recipe.async_pipeline.verl_bridge.agent_loop.episodes.episode import episode_with
from tests.conftest import Load
from tests.fakes.image_client import LATENTS, ROW, Client, draw

pytestmark = pytest.mark.real_engine


def drawn(module: ModuleType, row: dict[str, Any] = ROW, **settings: Any) -> tuple[Any, dict[str, Any]]:
    client = Client()
    return draw(module.DiffusionLoop, client, row, **settings), client.asked[0]


def stored(module: ModuleType, output: Any) -> dict[str, Any]:
    """Return the columns of the sample store."""
    fields = {"extra_fields": output.extra_fields}
    module.take_columns([output])
    module.add_columns([fields])
    return fields


def test_a_response_has_a_token_for_each_sde_step(module: ModuleType) -> None:
    output, asked = drawn(module)
    first = asked["window"][0]
    assert output.response_ids == [first, first + 1, first + 2] and output.response_mask == [1, 1, 1]
    assert output.response_logprobs == [-1.0] * 3 and output.prompt_ids == [3, 6]
    assert asked["prompt"] == "red square"

    fields = stored(module, output)
    assert fields["latents"].tolist() == LATENTS.tolist()
    assert fields["condition_pooled_projections"].tolist() == [1, 1, 1]
    assert "latents" not in fields["extra_fields"]
    assert fields["extra_fields"]["version_spans"] == [[7, 0]]


def rows_of(module: ModuleType, *sessions: int) -> dict[str, dict[str, Any]]:
    """Return the rows of a group in the sample store, by their keys."""
    return {
        f"a_{session}_0": stored(module, drawn(module, {**ROW, "session_id": session})[0])
        for session in sessions
    }


@pytest.mark.parametrize(("sessions", "asks"), [((0, 1, 2), 0), ((1, 0), 0), ((1, 2), 1)])
def test_one_response_of_a_prompt_has_its_conditions(
    module: ModuleType, sessions: tuple[int, ...], asks: int
) -> None:
    """Another request brings them if the response that was to do so is not in the group."""
    rows, client = rows_of(module, *sessions), Client()
    asyncio.run(module.share_conditions(client, ROW, rows))
    assert len(client.asked) == asks
    assert [one["prompt"] for one in client.asked] == ["red square"] * asks
    holder = "a_0_0" if 0 in sessions else "a_1_0"
    assert {fields["conditions_in"] for fields in rows.values()} == {holder}
    sizes = {key: len(fields["condition_pooled_projections"]) for key, fields in rows.items()}
    assert sizes == {key: 3 if key == holder else 0 for key in rows}


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({}, [True, False]), ({"at_once": False}, [True, True])],
)
def test_pictures_that_are_shown_or_scored_later_are_kept(
    module: ModuleType, settings: dict[str, Any], kept: list[bool]
) -> None:
    """Of a prompt, the first one is shown."""
    rows = [
        stored(module, drawn(module, {**ROW, "session_id": session}, **settings)[0]) for session in range(2)
    ]
    assert ["picture" in row["extra_fields"] for row in rows] == kept
    assert not any(module.KEPT in row["extra_fields"] for row in rows)


def test_validation_has_no_noise_and_one_token(module: ModuleType) -> None:
    with episode_with(validates=True):
        output, asked = drawn(module)
    assert asked["window"] is None
    assert (output.response_ids, output.response_mask, output.response_logprobs) == ([0], [1], [0.0])
    assert list(stored(module, output)) == ["extra_fields"]


def test_noise_follows_from_the_place_in_the_data(module: ModuleType) -> None:
    def asked(seed: int = 1, **changes: Any) -> dict[str, Any]:
        return drawn(module, {**ROW, **changes}, seed=seed)[1]

    assert asked() == asked(uid="b"), "a uid is another one in each run"
    trained = [asked(), asked(global_steps=4), asked(index=6), asked(seed=2)]
    with episode_with(validates=True):
        validated = asked()
    assert len({one["seed"] for one in (validated, *trained)}) == 5


def test_samples_of_a_prompt_share_a_window(module: ModuleType) -> None:
    asked = [
        drawn(module, {**ROW, "index": index, "session_id": session})[1]
        for index in range(20)
        for session in range(4)
    ]
    windows = [tuple(one["window"]) for one in asked]
    assert all(len(set(windows[at : at + 4])) == 1 for at in range(0, 80, 4))
    assert {first for first, _ in windows} == {0, 1, 2}
    assert len({one["seed"] for one in asked}) == 80


def test_a_transcript_is_not_kept(module: ModuleType, load: Load) -> None:
    """An output that is recalled from one would have no latents."""
    partial = load("recipe.async_pipeline.verl_bridge.agent_loop.tokens.partial_rollouts")
    client = Client()
    draw(module.DiffusionLoop, partial.RecordingClient(client, partial.Transcript()), ROW)
    assert len(client.asked) == 1
