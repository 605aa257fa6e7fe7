# SPDX-License-Identifier: Apache-2.0
"""The first picture of some prompts of a step is written with its prompt, reward and versions."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensordict import NonTensorStack, TensorDict

from recipe.async_pipeline.core.groups.items import Group, StepBatch, Trajectory
from recipe.async_pipeline.observe.run_directory.picture_folder import Picture
from recipe.async_pipeline.tools.run_directory import read_pictures
from tests.conftest import Load

pytestmark = pytest.mark.real_engine
Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def module(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.trainer.reporting.episode_texts")


class Store:
    """A sample store with pictures in the rows of the first sessions."""

    def __init__(self, side: int = 16, without: tuple[str, ...] = ()) -> None:
        self._side, self._without = side, without

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        assert partition_id == "train" and select_fields == ["extra_fields", "raw_prompt"]
        assert all(key.rsplit("_", 2)[1] == "0" for key in keys), "others have no picture"
        extra = [{} if key in self._without else {"picture": self.picture(key)} for key in keys]
        messages = [[{"role": "user", "content": f"prompt {key}"}] for key in keys]
        columns = {"extra_fields": NonTensorStack(*extra), "raw_prompt": NonTensorStack(*messages)}
        return TensorDict(columns, batch_size=len(keys))

    def picture(self, key: str) -> Any:
        found = np.zeros((3, self._side, self._side // 2), np.uint8)
        found[1] = ord(key[0])
        return found


def batch(*uids: str) -> StepBatch:
    def one(uid: str, session: int) -> Trajectory:
        return Trajectory(key=f"{uid}_{session}_0", first_version=5, last_version=6, num_tokens=3, reward=0.5)

    groups = tuple(
        Group(uid=uid, step=7, trajectories=tuple(one(uid, session) for session in (2, 0, 1))) for uid in uids
    )
    return StepBatch(step=7, groups=groups, payload=SimpleNamespace(partition_id="train", keys=[]))


def kept(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, store: Store, *uids: str
) -> list[Picture]:
    monkeypatch.setattr(module, "tq", store)
    module.KeptPictures(folder).keep(batch(*uids))
    missing: list[str] = []
    found = list(read_pictures(folder, missing))
    assert missing == []
    return found


def test_so_many_prompts_have_a_picture(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = Store()
    monkeypatch.setattr(module, "PICTURES", 2)
    found = kept(module, monkeypatch, tmp_path, store, "c", "a_x", "b")
    assert [one.prompt for one in found] == ["prompt a_x_0_0", "prompt b_0_0"]
    assert [(one.step, one.reward, one.first_version, one.last_version) for one in found] == [
        (7, 0.5, 5, 6)
    ] * 2
    for one, uid in zip(found, ("a_x", "b"), strict=True):
        with Image.open(tmp_path / "pictures" / one.file) as image:
            pixels = np.asarray(image)
        assert np.array_equal(pixels, store.picture(uid).transpose(1, 2, 0))


def test_large_pictures_are_kept_small(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (one,) = kept(module, monkeypatch, tmp_path, Store(1024), "a")
    with Image.open(tmp_path / "pictures" / one.file) as image:
        assert image.size == (module.LONGEST_SIDE // 2, module.LONGEST_SIDE)


def test_a_sample_without_a_picture_is_left_out(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that was kept by a process that kept none, for example."""
    found = kept(module, monkeypatch, tmp_path, Store(without=("a_0_0",)), "a", "b")
    assert [one.prompt for one in found] == ["prompt b_0_0"]


def test_pictures_of_prompts_are_written_once(module: ModuleType, tmp_path: Path) -> None:
    red, wide = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("L", (1024, 512), 7)
    content = [
        {"type": "text", "text": "and"},
        {"type": "image", "image": red},
        {"type": "image", "image": wide},
        {"type": "image", "image": "https://example.org/photo.jpg"},
        {"type": "image", "image": "data:image/png;base64," + 9999 * "A"},
    ]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "look"},
        {"role": "user", "content": content},
    ]
    messages += [{"role": "assistant", "content": None}, {"role": "assistant"}]
    first, second, third, inside = module.of_prompt(messages, tmp_path)
    assert third == "https://example.org/photo.jpg"
    assert inside.startswith("data:image/png;base64,AAA") and len(inside) == module.NAME_CHARACTERS
    with Image.open(tmp_path / first) as image:
        assert image.tobytes() == red.tobytes()
    with Image.open(tmp_path / second) as image:
        assert image.size == (256, 128)
    assert wide.size == (1024, 512), "the policy still sees the whole picture"

    before = (tmp_path / first).stat().st_mtime_ns
    again = module.of_prompt(
        [{"role": "user", "content": [{"type": "image", "image": red.copy()}]}], tmp_path
    )
    assert again == [first] and (tmp_path / first).stat().st_mtime_ns == before
    assert len([*(tmp_path / "pictures").iterdir()]) == 2
    assert module.of_prompt([{"role": "user", "content": "text"}], tmp_path) == []
