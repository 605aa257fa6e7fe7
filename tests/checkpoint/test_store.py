# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is complete or absent; a damaged or foreign one is refused with the reason."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.checkpoint.hashed_file import WrittenFiles
from recipe.async_pipeline.checkpoint.store import (
    MANIFEST,
    TRACKER,
    FoundCheckpoint,
    begin,
    damage,
    newest,
    next_epoch,
    prune,
    publish,
    published,
    sweep,
    verify,
)
from recipe.async_pipeline.errors import CheckpointError, ConfigError

MINE = {"trainer.project_name": "mine", "verl": "0.9.1"}


def made(root: Path, step: int, *, run: str = "r", epoch: int = 1, text: str = "weights") -> Path:
    """Publish a checkpoint of a process whose host has a clock that runs backwards."""
    part = begin(root, step)
    (part / "actor").mkdir()
    (part / "actor" / "model.pt").write_text(text)
    (part / "pipeline.json").write_text("{}")
    return publish(
        part, step=step, run=run, identity=MINE, saved_unix=9e9 - step, epoch=epoch, record=step * 10
    )


def test_a_published_checkpoint_verifies_and_is_named_for_verls_tools(tmp_path: Path) -> None:
    folder = made(tmp_path, 5)
    assert folder == tmp_path / "global_step_5"
    manifest = verify(folder, MINE)
    assert (manifest.step, manifest.run) == (5, "r")
    assert [(f.path, f.nbytes) for f in manifest.files] == [("actor/model.pt", 7), ("pipeline.json", 2)]
    assert (tmp_path / TRACKER).read_text() == "5"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_5", TRACKER]


def spoil(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            spoil("actor/model.pt", lambda data: b"W" + data[1:]),
            "the contents of actor/model.pt differ from what was written",
        ),
        (spoil("actor/model.pt", lambda data: data[:3]), "actor/model.pt has 3 bytes instead of 7"),
        (
            lambda folder: (folder / "actor" / "model.pt").unlink(),
            "actor/model.pt cannot be read: No such file",
        ),
        (lambda folder: (folder / MANIFEST).unlink(), f"has no {MANIFEST}"),
        (spoil(MANIFEST, lambda data: data[:40]), "cannot be read, or differs from what was written"),
        (
            spoil(MANIFEST, lambda data: data.replace(b'"step": 5', b'"step": 6')),
            "differs from what was written",
        ),
        (lambda folder: shutil.rmtree(folder), "does not exist"),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: Callable[[Path], None], reason: str) -> None:
    folder = made(tmp_path, 5)
    damage(folder)
    with pytest.raises(CheckpointError, match=reason) as caught:
        verify(folder, MINE, contents=True)
    assert "global_step_5" in str(caught.value) and "\n" not in str(caught.value)


def test_files_are_read_only_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path, 5)
    opened: list[str] = []
    real = Path.open

    def recorded(path: Path, *args: Any, **kwargs: Any) -> Any:
        opened.append(path.name)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", recorded)
    verify(folder, MINE)
    assert "model.pt" not in opened
    verify(folder, MINE, contents=True)
    assert "model.pt" in opened


def test_a_process_checks_the_files_that_it_loads(tmp_path: Path) -> None:
    part = begin(tmp_path, 5)
    names = ["pipeline.json", "actor/a_rank_0.pt", "actor/a_rank_1.pt", "actor/huggingface/config.json"]
    for name in [*names, "reference/rank_1_of_2.safetensors"]:
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        (part / name).write_text(name)
    folder = publish(part, step=5, run="r", identity=MINE, saved_unix=5.0, epoch=1, record=1)

    def found() -> list[str | None]:
        return [
            damage(folder),
            *(damage(folder, where, r) for where in ("actor", "reference") for r in (0, 1)),
        ]

    assert found() == [None] * 5
    for place, name in enumerate([names[0], names[3], names[2], "", "reference/rank_1_of_2.safetensors"]):
        if name:
            (folder / name).write_bytes((folder / name).read_bytes().swapcase())
            wrong = [
                f"the contents of {name} differ from what was written" if i == place else None
                for i in range(5)
            ]
            assert found() == wrong
            (folder / name).write_text(name)
    (folder / MANIFEST).unlink()
    assert damage(folder) == f"its {MANIFEST} cannot be read"


def test_files_that_were_hashed_while_they_were_written_are_not_read(tmp_path: Path) -> None:
    part, counted = begin(tmp_path, 5), list[int]()
    files = WrittenFiles(part)
    with files.create(part / "samples") as file:
        file.write(b"12345")
    (part / "model.pt").write_text("weights")
    folder = publish(
        part,
        step=5,
        run="r",
        identity=MINE,
        saved_unix=5.0,
        epoch=1,
        record=1,
        known=files.entries,
        count=counted.append,
    )
    assert sum(counted) == len("weights")
    verify(folder, MINE, contents=True)


@pytest.mark.parametrize(
    ("identity", "reason"),
    [
        ({**MINE, "verl": "0.9.2"}, "belongs to another run: verl was 0.9.1 there and is 0.9.2 here"),
        ({**MINE, "strategy": "x"}, "belongs to another run: strategy was \\(not set\\) there and is x here"),
        (
            {"verl": "0.9.1"},
            "belongs to another run: trainer.project_name was mine there and is \\(not set\\) here",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, identity: dict[str, str], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        verify(made(tmp_path, 5), identity)


@pytest.mark.parametrize("path", ["a\0b", "../../x", "/etc/passwd", "n" * 5000])
def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path: Path, path: str) -> None:
    folder = made(tmp_path, 5)
    manifest = verify(folder, MINE)
    entry = msgspec.structs.replace(manifest.files[0], path=path)
    for files, reason in (((entry,), "damaged: "), ((), "lists no file")):
        false = msgspec.structs.replace(manifest, files=files).sealed()
        (folder / MANIFEST).write_bytes(msgspec.json.encode(false))
        with pytest.raises(CheckpointError, match=reason):
            verify(folder, MINE)


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    moved = made(tmp_path, 5).rename(tmp_path / "global_step_9")
    with pytest.raises(CheckpointError, match="holds step 5: it was renamed"):
        verify(moved, MINE)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(data=st.binary(max_size=200), at=st.integers(0, 400), whole=st.booleans())
def test_any_damaged_manifest_raises_only_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int, whole: bool
) -> None:
    folder = made(tmp_path_factory.mktemp("fuzz"), 5)
    manifest = (folder / MANIFEST).read_bytes()
    spoiled = data if whole else manifest[:at] + data + manifest[at + len(data) :]
    (folder / MANIFEST).write_bytes(spoiled)
    try:
        verify(folder, MINE)
    except CheckpointError:
        assert spoiled != manifest


def test_newest_finds_the_newest_usable_checkpoint(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        made(tmp_path, step)
    (tmp_path / "global_step_15" / "pipeline.json").write_text("[]")
    lines: list[str] = []
    unread = newest(tmp_path, MINE, None, lines.append)
    assert unread is not None and unread.manifest.step == 15 and lines == []
    found = newest(tmp_path, MINE, None, lines.append, contents=True)
    assert found == FoundCheckpoint(tmp_path / "global_step_10", verify(tmp_path / "global_step_10", MINE))
    (line,) = lines
    assert (
        line.startswith("checkpoint refused: ")
        and "global_step_15 is damaged: the contents of pipeline.json" in line
    )


def test_newest_means_most_recently_written(tmp_path: Path) -> None:
    """A fresh start in the same folder has lower steps than the run before it."""
    made(tmp_path, 40, run="old")
    epoch = next_epoch(tmp_path)
    made(tmp_path, 5, run="new", epoch=epoch)
    found = newest(tmp_path, MINE, None, print)
    assert found is not None and found.manifest.run == "new"
    assert (epoch, next_epoch(tmp_path)) == (2, 3)


def test_a_process_that_resumed_an_older_checkpoint_keeps_what_it_writes(tmp_path: Path) -> None:
    """It repeats steps, on a host whose clock is behind."""
    for step in (10, 15):
        made(tmp_path, step)
    folder = made(tmp_path, 12, epoch=next_epoch(tmp_path))
    assert [path.name for path in prune(tmp_path, "r", 1)] == ["global_step_15", "global_step_10"]
    assert published(tmp_path) == [folder]


def test_a_checkpoint_whose_manifest_is_lost_is_reported_first(tmp_path: Path) -> None:
    for step in (5, 10):
        made(tmp_path, step)
    (tmp_path / "global_step_5" / MANIFEST).write_text("{")
    lines: list[str] = []
    found = newest(tmp_path, MINE, None, lines.append)
    assert found is not None and found.manifest.step == 10
    assert len(lines) == 1 and "global_step_5 is damaged: its manifest.json cannot be read" in lines[0]


def test_an_older_format_is_named(tmp_path: Path) -> None:
    folder = made(tmp_path, 5)
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["epoch"], manifest["record"]
    (folder / MANIFEST).write_text(json.dumps(manifest | {"format": 1}))
    with pytest.raises(CheckpointError, match="has format 1; this version of the pipeline reads 2 and 3"):
        verify(folder, MINE)


def test_without_a_checkpoint_there_is_nothing_to_resume_from(tmp_path: Path) -> None:
    begin(tmp_path, 5)
    assert newest(tmp_path, MINE, None, print) is None
    assert newest(tmp_path / "not there", MINE, None, print) is None


def test_auto_does_not_start_fresh_if_no_checkpoint_is_usable(tmp_path: Path) -> None:
    made(tmp_path, 5)
    with pytest.raises(
        ConfigError,
        match="resume_mode=auto found no usable checkpoint .*set trainer.resume_mode=disable",
    ):
        newest(tmp_path, {**MINE, "verl": "1"}, None, lambda line: None)


@pytest.mark.parametrize("keep", [1, 2, None])
def test_prune_deletes_the_oldest_of_this_run(tmp_path: Path, keep: int | None) -> None:
    made(tmp_path, 99, run="other", epoch=0)
    for step in (5, 10, 15):
        made(tmp_path, step)
    gone = prune(tmp_path, "r", keep)
    assert [int(path.name.rpartition("_")[2]) for path in published(tmp_path)] == {
        1: [15, 99],
        2: [15, 10, 99],
        None: [15, 10, 5, 99],
    }[keep]
    assert len(gone) == (0 if keep is None else 3 - keep)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    made(tmp_path, 5, text="old")
    folder = made(tmp_path, 5, text="new")
    assert (folder / "actor" / "model.pt").read_text() == "new"
    verify(folder, MINE)


def test_the_checkpoint_of_another_run_is_moved_away(tmp_path: Path) -> None:
    for _ in range(2):
        made(tmp_path, 5, run="old", text="old")
        made(tmp_path, 5, run="new", epoch=2, text="new")
    kept = tmp_path / "earlier.old" / "global_step_5"
    assert verify(kept, MINE, "old", contents=True).run == "old"
    assert (tmp_path / "earlier.new" / "global_step_5" / "actor" / "model.pt").read_text() == "new"
    assert verify(tmp_path / "global_step_5", MINE, "new", contents=True).run == "new"
    assert published(tmp_path) == [tmp_path / "global_step_5"]


class Killed(BaseException):
    pass


@pytest.mark.slow
def test_a_kill_at_any_system_call_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt the second checkpoint before each call that changes the disk."""
    calls = ["fsync", "rename", "replace", "mkdir"]
    real = {name: getattr(os, name) for name in calls}
    left = [0]

    def interrupted(name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real[name](*args, **kwargs)

        return call

    moments = 0
    while True:
        root = tmp_path / str(moments)
        made(root, 5)
        left[0] = moments
        with monkeypatch.context() as patched:
            for name in calls:
                patched.setattr(os, name, interrupted(name))
            try:
                made(root, 10)
                break
            except Killed:
                moments += 1
        sweep(root)
        found = newest(root, MINE, None, print)
        assert found is not None and found.manifest.step in (5, 10)
        assert {path.name for path in root.iterdir()} <= {
            "global_step_5",
            "global_step_10",
            TRACKER,
            "latest_checkpointed_iteration.part",
        }
    # Python 3.10 does not route mkdir of pathlib through os.mkdir.
    assert moments > (8 if sys.version_info >= (3, 11) else 6)


def test_sweep_deletes_leftovers_only(tmp_path: Path) -> None:
    made(tmp_path, 5)
    (begin(tmp_path, 10) / "half").write_text("x")
    (tmp_path / ".global_step_3.gone").mkdir()
    (tmp_path / "notes").mkdir()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_5", TRACKER, "notes"]
    sweep(tmp_path / "not there")
