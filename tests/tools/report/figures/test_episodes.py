# SPDX-License-Identifier: Apache-2.0
"""Episodes are read from the ledger, and get their text from verl's file if both agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.errors import RunFilesError
from recipe.async_pipeline.observe.run_directory.agent_output import AgentOutputFolder, FailedAttempt
from recipe.async_pipeline.tools.report.figures.episodes import read_episodes
from tests.fakes.ledgers import resumed, whole, write


def run_of(tmp_path: Path, records: list[Any], rows: dict[int, list[Any]] | None = None) -> Path:
    write(tmp_path / "ledger.jsonl", records)
    if rows is not None:
        texts = tmp_path / "texts"
        texts.mkdir()
        for step, found in rows.items():
            (texts / f"{step}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found))
        config = {"trainer": {"rollout_data_dir": str(texts)}}
        (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def keys_of(step: int) -> list[str]:
    trained = next(r for r in whole() if r["kind"] == "trained" and r["step"] == step)
    finished = {r["uid"]: r["trajectories"] for r in whole() if r["kind"] == "finished"}
    return sorted(one["key"] for uid in trained["uids"] for one in finished[uid])


def text_of(key: str, number: int) -> dict[str, Any]:
    """Return a row as verl writes it."""
    return {"input": f"in {number}", "output": f"out {number}", "score": 0, "uid": key}


def test_the_last_step_is_read_by_default(tmp_path: Path) -> None:
    found = read_episodes(run_of(tmp_path, [*whole()]))
    assert (found.step, sorted(one.key for one in found.episodes)) == (4, keys_of(4))
    assert {one.end for one in found.episodes} == {"done"}
    assert found.outputs == ()
    assert found.without_text == "the run wrote no text; set trainer.rollout_data_dir to have it"


def test_ends_and_texts_belong_to_their_episodes(tmp_path: Path) -> None:
    records = whole()
    for record in records:
        for one in record["trajectories"] if record["kind"] == "finished" else ():
            if one["key"] == keys_of(2)[1]:
                one |= {"end": "turns", "attempts": 2, "reward": -1.0}
    # verl sorts by key, and pads the batch.
    rows = [text_of(key, i) for i, key in enumerate([*keys_of(2), "pad_0_0", "pad_1_0"])]
    found = read_episodes(run_of(tmp_path, [*records], {2: rows}), 2)
    assert found.without_text == ""
    assert [(one.key, one.response) for one in found.episodes] == [
        (key, f"out {i}") for i, key in enumerate(keys_of(2))
    ]
    second = found.episodes[1]
    assert (second.prompt, second.end, second.attempts, second.reward) == ("in 1", "turns", 2, -1.0)


def test_text_in_the_run_directory_is_found_from_any_folder(tmp_path: Path) -> None:
    run = run_of(tmp_path, [*whole()], {2: [text_of(key, 0) for key in keys_of(2)]})
    (run / "config.json").write_text('{"trainer": {"rollout_data_dir": "outputs/lake/run/texts"}}')
    assert {one.response for one in read_episodes(run, 2).episodes} == {"out 0"}


def test_who_wrote_which_part_is_read(tmp_path: Path) -> None:
    records = whole()
    keys = keys_of(2)
    for record in records:
        for one in record["trajectories"] if record["kind"] == "finished" else ():
            if one["key"] == keys[0]:
                one["turns"] = 2
            one |= {"first": 1, "last": 2} if one["key"] == keys[0] else {"first": 1, "last": 1}
    parts = [[True, "R", 1], [False, "\n..>", None], [True, "D", None], [True, "D"]]
    first = {**text_of(keys[0], 0), "turns": parts, "place": {"index": 7}}
    rows = [first, *(text_of(key, 1) | {"turns": None} for key in keys[1:])]
    one, other = read_episodes(run_of(tmp_path, [*records], {2: rows}), 2).episodes[:2]
    assert (one.parts, one.turns, one.place) == (
        ((True, "R", 1), (False, "\n..>", None), (True, "D", None), (True, "D", None)),
        2,
        {"index": 7},
    )
    assert (other.parts, other.turns, other.place) == (((True, "out 1", 1),), 1, {})


def test_a_conversation_that_another_one_follows_is_not_the_last(tmp_path: Path) -> None:
    records = whole()
    keys = keys_of(2)
    renamed = dict(zip(keys, ["u_0_1", "u_0_0", "u_1_0", "v_0_0"], strict=True))
    for record in records:
        for one in record["trajectories"] if record["kind"] == "finished" else ():
            one["key"] = renamed.get(one["key"], one["key"])
    found = read_episodes(run_of(tmp_path, records), 2).episodes
    assert [(one.key, one.is_last) for one in found] == [
        ("u_0_0", False),
        ("u_0_1", True),
        ("u_1_0", True),
        ("v_0_0", True),
    ]


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ({}, "2.jsonl cannot be read"),
        ({2: [{}]}, "2.jsonl cannot be read"),
        ({2: [text_of("other_0_0", 0)]}, "the text of 4 of 4 responses is not in the file of step 2"),
        ({2: [text_of(keys_of(2)[3], 0)]}, "the text of 3 of 4 responses is not in the file of step 2"),
    ],
)
def test_missing_text_is_reported(tmp_path: Path, rows: dict[int, list[Any]], why: str) -> None:
    found = read_episodes(run_of(tmp_path, [*whole()], rows), 2)
    assert why in found.without_text and found.episodes[0].response is None


def test_what_a_resumed_run_made_void_is_not_shown(tmp_path: Path) -> None:
    before, after = resumed()
    found = read_episodes(run_of(tmp_path, [*before, *after]))
    assert found.step == 6 and len(found.episodes) == len({one.key for one in found.episodes})


def test_a_run_without_such_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFilesError, match="does not exist; give a run directory"):
        read_episodes(tmp_path)
    run = run_of(tmp_path, [*whole()])
    with pytest.raises(RunFilesError, match="step 9 is not in .* its steps are 1 to 4"):
        read_episodes(run, 9)
    write(run / "ledger.jsonl", [whole()[0], "half a li"])
    AgentOutputFolder(tmp_path).add(1, [FailedAttempt("u_0", 1, "agent_failed", "a bug", "Traceback")])
    with pytest.raises(RunFilesError, match="has no trained step.*; .*agent_output has the failed attempts"):
        read_episodes(run)


def test_the_pictures_of_a_prompt_are_found_where_the_run_put_them(tmp_path: Path) -> None:
    named = {"pictures": ["pictures/1.png", "photos/7.jpg"]}
    rows = [text_of(key, i) | (named if i == 0 else {}) for i, key in enumerate(keys_of(2))]
    run = run_of(tmp_path, [*whole()], {2: rows})
    picture = tmp_path / "texts" / "pictures" / "1.png"
    picture.parent.mkdir()
    picture.touch()
    first, *others = read_episodes(run, 2).episodes
    assert first.pictures == (str(picture), "photos/7.jpg"), "the second one has a name in the data alone"
    assert not any(one.pictures for one in others)
