# SPDX-License-Identifier: Apache-2.0
"""Pictures are read as they were written, the last of a name counts, and what is lost is named."""

from __future__ import annotations

from pathlib import Path

import msgspec

from recipe.async_pipeline.observe.run_directory.picture_folder import FOLDER, INDEX, Picture, PictureFolder
from recipe.async_pipeline.tools.run_directory import read_pictures


def about(step: int, reward: float | None = 0.5, number: int = 0) -> Picture:
    return Picture(
        step=step,
        file=f"{step:06}-{number}.png",
        prompt="a red square",
        reward=reward,
        first_version=step - 1,
        last_version=step - 1,
    )


def write(run_dir: Path, *pictures: Picture) -> None:
    folder = PictureFolder(run_dir)
    for one in pictures:
        folder.place_of(one).write_bytes(one.file.encode())
    folder.add(pictures)


def read(run_dir: Path) -> tuple[list[Picture], list[str]]:
    missing: list[str] = []
    return list(read_pictures(run_dir, missing)), missing


def test_pictures_are_read_by_step(tmp_path: Path) -> None:
    write(tmp_path, about(2))
    write(tmp_path, about(1), about(1, number=1))
    found, missing = read(tmp_path)
    assert [(one.step, one.png) for one in found] == [
        (1, b"000001-0.png"),
        (1, b"000001-1.png"),
        (2, b"000002-0.png"),
    ]
    assert msgspec.structs.replace(found[2], png=b"") == about(2) and missing == []


def test_a_step_that_is_trained_again_has_its_last_pictures(tmp_path: Path) -> None:
    write(tmp_path, about(1, 0.25))
    write(tmp_path, about(1, None))
    assert [one.reward for one in read(tmp_path)[0]] == [None]


def test_nothing_is_made_without_pictures(tmp_path: Path) -> None:
    PictureFolder(tmp_path).add([])
    assert list(tmp_path.iterdir()) == [] and read(tmp_path) == ([], [])


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path, about(1), about(2))
    (tmp_path / FOLDER / about(1).file).unlink()
    with (tmp_path / FOLDER / INDEX).open("ab") as index:
        index.write(b'{"step": 3, "fi')
    found, missing = read(tmp_path)
    assert [one.step for one in found] == [2]
    assert missing == ["pictures: 2 of 3 pictures cannot be read"]


def test_a_line_does_not_name_a_file_of_another_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    write(tmp_path, about(1))
    outside = msgspec.structs.replace(about(2), file="../secret.png")
    PictureFolder(tmp_path).add([outside])
    found, missing = read(tmp_path)
    assert [one.step for one in found] == [1] and len(missing) == 1
