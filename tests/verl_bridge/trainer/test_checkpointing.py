# SPDX-License-Identifier: Apache-2.0
"""The order in which a checkpoint is written, and what happens if the disk is full.

Whole jobs test the contents, see tests/e2e/test_resume.py.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from ray.exceptions import RayTaskError

from recipe.async_pipeline.checkpoint.hashed_file import FileEntry
from recipe.async_pipeline.core.schedule import Schedule
from recipe.async_pipeline.errors import CheckpointError, WaitTimeout
from recipe.async_pipeline.observe.observers import Observers
from tests import HANG_S
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


NO_SPACE, NO_QUOTA = OSError(28, "No space left on device"), OSError(122, "Disk quota exceeded")


@pytest.mark.parametrize(
    "error",
    [
        NO_SPACE,
        NO_QUOTA,
        RayTaskError("save", "traceback", NO_SPACE),
        RayTaskError("save", "traceback", NO_SPACE).as_instanceof_cause(),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("write failed: Disk quota exceeded"),
    ],
)
def test_a_full_disk_is_recognized(module: ModuleType, error: Exception) -> None:
    assert module.is_full(error)


@pytest.mark.parametrize(
    "text",
    [
        "PytorchStreamWriter failed writing file data/0: file write failed",
        # Torch's error on a tmpfs without a free byte.
        "[enforce fail at inline_container.cc:672] . unexpected pos 128 vs 0",
        "basic_ios::clear: iostream error",
    ],
)
def test_an_error_without_its_reason_is_a_full_disk_if_there_is_no_room(
    module: ModuleType, text: str
) -> None:
    assert module.is_full(RuntimeError(text), True)
    assert not module.is_full(RuntimeError(text), False)


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(number, os.strerror(number)) for number in (1, 2, 5, 13, 20, 30, 116)),
        RayTaskError("save", "traceback", PermissionError(13, "Permission denied")),
        OSError("no number"),
        TimeoutError("a worker did not answer"),
        ConnectionError("a worker is gone"),
        RuntimeError("shapes differ"),
        RuntimeError("SafetensorError: header too large"),
    ],
)
def test_no_other_error_is_a_full_disk(module: ModuleType, error: Exception) -> None:
    assert not module.is_full(error, True)


def test_a_disk_has_many_errors(module: ModuleType) -> None:
    disk = [OSError(13, "no"), OSError("1 of 2 ranks have written"), RuntimeError("iostream error")]
    other = [TimeoutError("x"), ConnectionError("x"), RuntimeError("shapes differ")]
    assert [module.is_of_disk(error) for error in (*disk, *other)] == [True] * 3 + [False] * 3


def test_room_is_that_of_the_file_system(module: ModuleType, tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert module.no_room(tmp_path) is (free < module.LEAST_BYTES)
    assert not module.no_room(tmp_path / "missing")


class Saving:
    """A run at step 2 of 4 whose checkpoints are made of events."""

    def __init__(self, load: Load, module: ModuleType, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.events: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.lines: list[str] = []
        self.observers = Observers(self.lines.append)
        self.state: Any = None
        self.engines = asyncio.Event()
        self.engines.set()
        saving = self

        class Made:
            def begin(self, step: int) -> Any:
                saving.event("begin")
                return module.Unfinished(root / "part")

            def write_models(self, part: Any, state: Any) -> None:
                saving.event("models")

            def write_rest(self, part: Any, snapshot: Any) -> None:
                saving.event("rest")
                saving.state = snapshot.state
                written = {name for names in snapshot.state.shards.values() for name in names}
                assert {*part.files.entries} == written

            def publish(self, part: Any, step: int) -> Path:
                saving.event("publish")
                return root / "global_step_2"

        calls = load("recipe.async_pipeline.verl_bridge.calls.ray_calls").BlockingCalls(60.0)
        self.checkpointing = module.Checkpointing(
            run="r",
            identity={},
            epoch=1,
            config=OmegaConf.create({"default_local_dir": str(root)}),
            schedule=Schedule(batch=1, last_step=4, ref_refresh_every=2),
            calls=calls,
            stages=SimpleNamespace(kl_coefficient=lambda step: 10.0 * step),
            actor_group=None,
            critic_group=None,
            copies={},
            prompts=SimpleNamespace(state=lambda flying, finished: ("prompts", "loader"), loader_state=""),
            manager=SimpleNamespace(note_transcripts=self.note_transcripts),
            bad_data=SimpleNamespace(state=dict),
            recorder=SimpleNamespace(state=dict),
            ledger=SimpleNamespace(sync=None),
            partition="train",
            rejects=lambda group: None,
            on_save=lambda step, folder: self.event(f"saved {step}"),
            observers=self.observers,
            patience_s=HANG_S,
            stall_s=60.0,
        )
        monkeypatch.setattr(module, "Checkpoints", lambda **_: Made())
        monkeypatch.setattr(module, "say", self.lines.append)
        monkeypatch.setattr(module, "note", self.note)
        monkeypatch.setattr(module.Unfinished, "abandon", lambda part: self.event("abandon"))

    def event(self, name: str) -> None:
        self.events.append(name)
        if name in self.fails:
            raise self.fails[name]

    def note(self, groups: Any, partition: str) -> list[Any]:
        self.event("samples are noted")
        return [self.shard]

    async def note_transcripts(self, uids: Any, version: int) -> list[Any]:
        await self.engines.wait()
        self.event("transcripts are noted")
        return [self.shard, self.shard]

    async def shard(self, root: str, name: str) -> list[Any]:
        self.event(name)
        (Path(root) / name).parent.mkdir(parents=True, exist_ok=True)
        (Path(root) / name).touch()
        return [FileEntry(path=name, nbytes=0, xxh3="")]

    def run(self, step: int = 2) -> bool:
        state = SimpleNamespace(step=step, in_flight=tuple, finished=tuple)

        def all_read() -> None:
            self.events.append("all is read")
            self.engines.set()

        saved: bool = asyncio.run(
            self.checkpointing.save(
                state, models_read=lambda: self.events.append("models are read"), all_read=all_read
            )
        )
        return saved


@pytest.fixture
def saving(load: Load, module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Saving:
    return Saving(load, module, monkeypatch, tmp_path)


def test_a_step_may_be_trained_once_all_is_noted(saving: Saving) -> None:
    """It waits for no engine that reports its tokens, and for no byte of samples."""
    saving.engines.clear()
    assert saving.run()
    assert saving.events[0] == "begin"
    assert saving.events.index("models") < saving.events.index("models are read")
    assert {*saving.events[1:4]} == {"models", "models are read", "samples are noted"}
    assert saving.events[4:6] == ["all is read", "transcripts are noted"]
    assert {*saving.events[6:9]} == {"samples/rank_0", "transcripts/rank_0", "transcripts/rank_1"}
    assert saving.events[9:] == ["rest", "publish", "saved 2"]
    assert saving.state.shards == {
        "samples": ["samples/rank_0"],
        "transcripts": ["transcripts/rank_0", "transcripts/rank_1"],
    }


@pytest.mark.parametrize("error", [WaitTimeout("late"), RayTaskError("x", "traceback", OSError("gone"))])
def test_without_partial_responses_a_checkpoint_is_written(saving: Saving, error: Exception) -> None:
    saving.fails["transcripts are noted"] = error
    assert saving.run()
    assert saving.state.shards == {"samples": ["samples/rank_0"], "transcripts": []}
    assert "partial responses are not kept" in saving.lines[0]


MOMENTS = ("begin", "models", "samples/rank_0", "transcripts/rank_1", "rest", "publish")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("step", [2, 4])
def test_a_full_disk_ends_the_run_at_its_last_step_only(saving: Saving, moment: str, step: int) -> None:
    saving.fails[moment] = OSError(28, "No space left on device")
    if step == 4:
        with pytest.raises(OSError, match="No space"):
            saving.run(step)
    else:
        assert not saving.run(step)
        assert "step 2 has no checkpoint, because the disk is full; those before stay" in saving.lines[0]
    if moment != "begin":
        assert saving.events[-1] == "abandon"
    if moment.startswith("transcripts"):
        assert {"samples/rank_0", "transcripts/rank_0"} <= {*saving.events}, "all have ended before"


def test_the_last_step_names_the_full_disk_that_a_library_does_not(saving: Saving) -> None:
    saving.fails["models"] = RuntimeError("Could not write the shard (os error 28)")
    with pytest.raises(OSError, match="No space left on device for the checkpoint of step 4") as raised:
        saving.run(4)
    assert raised.value.errno == errno.ENOSPC and raised.value.__cause__ is saving.fails["models"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_disk_that_fails_for_a_moment_costs_one_checkpoint(saving: Saving, number: int) -> None:
    saving.fails["publish"] = RayTaskError("save", "traceback", OSError(number, "of a network"))
    assert not saving.run()
    assert "step 2 has no checkpoint, because the disk fails; those before stay" in saving.lines[0]
    with pytest.raises(RayTaskError):
        saving.run(4)


@pytest.mark.parametrize(
    "error", [WaitTimeout("train waited"), PermissionError(13, "Permission denied"), OSError(30, "read-only")]
)
def test_another_error_ends_the_run(saving: Saving, error: Exception) -> None:
    saving.fails["publish"] = error
    with pytest.raises(type(error)):
        saving.run()
    assert saving.events[-1] == "abandon"


def test_the_last_call_of_a_callback_is_repeated_before_the_run_ends(saving: Saving) -> None:
    saving.fails["saved 4"] = ConnectionError("503")
    assert saving.run(4)
    del saving.fails["saved 4"]
    saving.checkpointing.close()
    assert saving.events[-2:] == ["saved 4", "saved 4"]
    assert saving.observers.off == {}


def test_a_callback_that_keeps_failing_is_named_at_the_end(saving: Saving) -> None:
    saving.fails["saved 4"] = ConnectionError("503")
    assert saving.run(4)
    saving.checkpointing.close()
    assert saving.observers.off == {"the checkpoint callback": "ConnectionError: 503"}


def test_damage_is_refused_before_anything_is_loaded(module: ModuleType, tmp_path: Path) -> None:
    loaded: list[str] = []
    group = SimpleNamespace(
        damage=lambda folder, name: [None, f"the contents of {name}/x differ"],
        load_checkpoint=lambda **paths: loaded.append("model"),
        load_reference=loaded.append,
    )
    restored = SimpleNamespace(folder=tmp_path / "global_step_2", state=SimpleNamespace(reference=1))
    refused: list[Callable[[], None]] = [
        lambda: module.load_models(restored, group, None),
        lambda: module.load_reference(restored, SimpleNamespace(group=group)),
    ]
    for load in refused:
        with pytest.raises(CheckpointError, match="global_step_2 is damaged: the contents of .*/x") as caught:
            load()
        assert "\n" not in str(caught.value)
    assert loaded == []


def test_a_checkpoint_has_the_values_of_the_saved_step(saving: Saving) -> None:
    """The next step may have moved the KL coefficient already."""
    assert saving.run(3)
    assert (saving.state.kl_coef, saving.state.reference) == (30.0, 2)
    assert saving.run(2)
    assert (saving.state.kl_coef, saving.state.reference) == (20.0, None), "published again at the resume"
