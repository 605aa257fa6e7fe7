# SPDX-License-Identifier: Apache-2.0
"""The order in which a checkpoint is written, and what happens if the disk is full.

Whole jobs test the contents, see tests/e2e/test_resume.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.errors import CheckpointError, WaitTimeout
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module")
def module(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.trainer.checkpointing")


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(28, "No space left on device"), True),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), True),
        # Torch's error on a tmpfs without a free byte.
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 128 vs 0"), True),
        (RuntimeError("basic_ios::clear: iostream error"), True),
        (TimeoutError("a worker did not answer"), False),
        (ConnectionError("a worker is gone"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_a_full_disk_is_distinguished_from_other_errors(
    module: ModuleType, error: Exception, full: bool
) -> None:
    assert module.is_full(error) is full


class Saving:
    """A run at step 2 of 4 whose checkpoints are made of events."""

    def __init__(self, load: Load, module: ModuleType, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.events: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.lines: list[str] = []
        saving = self

        class Made:
            def begin(self, step: int) -> Any:
                saving.event("begin")
                return module.Unfinished(root / "part")

            def write_models(self, part: Any, state: Any) -> None:
                saving.event("models")

            def write_rest(self, part: Any, snapshot: Any) -> None:
                saving.event("rest")

            def publish(self, part: Any, step: int) -> Path:
                saving.event("publish")
                return root / "global_step_2"

        calls = load("recipe.async_pipeline.verl_bridge.trainer.calls").BlockingCalls(60.0)
        self.checkpointing = module.Checkpointing.__new__(module.Checkpointing)
        vars(self.checkpointing).update(
            _calls=calls,
            _stall_s=60.0,
            _schedule=SimpleNamespace(last_step=4),
            _checkpoints=Made,
            _snapshot=lambda state: module.Snapshot(SimpleNamespace(flow=state), (), None, None, {}),
            _partial_rollouts=self.partial_rollouts,
            _on_save=lambda step, folder: self.event(f"saved {step}"),
        )
        monkeypatch.setattr(module, "say", self.lines.append)
        monkeypatch.setattr(module.Unfinished, "abandon", lambda part: self.event("abandon"))

    def event(self, name: str) -> None:
        self.events.append(name)
        if name in self.fails:
            raise self.fails[name]

    async def partial_rollouts(self, uids: Any) -> dict[str, Any]:
        return {}

    def run(self, step: int = 2) -> bool:
        state = SimpleNamespace(step=step, in_flight=tuple)
        marked: Callable[[str], Callable[[], None]] = lambda name: lambda: self.events.append(name)
        saved: bool = asyncio.run(
            self.checkpointing.save(
                state, models_read=marked("models are read"), all_read=marked("all is read")
            )
        )
        return saved


@pytest.fixture
def saving(load: Load, module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Saving:
    return Saving(load, module, monkeypatch, tmp_path)


def test_a_step_may_be_trained_once_all_is_read(saving: Saving) -> None:
    assert saving.run()
    assert saving.events[0] == "begin"
    assert saving.events.index("models") < saving.events.index("models are read")
    assert {*saving.events[1:4]} == {"models", "rest", "models are read"}
    assert saving.events[4:] == ["all is read", "publish", "saved 2"]


@pytest.mark.parametrize("moment", ["begin", "models", "rest", "publish"])
@pytest.mark.parametrize("step", [2, 4])
def test_a_full_disk_ends_the_run_at_its_last_step_only(saving: Saving, moment: str, step: int) -> None:
    saving.fails[moment] = OSError(28, "No space left on device")
    if step == 4:
        with pytest.raises(OSError, match="No space"):
            saving.run(step)
    else:
        assert not saving.run(step)
        assert "step 2 has no checkpoint, those before stay" in saving.lines[0]
    if moment != "begin":
        assert saving.events[-1] == "abandon"
    if moment in ("models", "rest"):
        assert {"models", "rest"} <= {*saving.events}, "both have ended before the files are deleted"


def test_another_error_ends_the_run(saving: Saving) -> None:
    saving.fails["publish"] = WaitTimeout("train waited")
    with pytest.raises(WaitTimeout):
        saving.run()
    assert saving.events[-1] == "abandon"


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


def test_a_snapshot_has_the_values_of_the_saved_step(module: ModuleType) -> None:
    """The next step may have moved the KL coefficient already."""
    checkpointing = module.Checkpointing.__new__(module.Checkpointing)
    vars(checkpointing).update(
        _prompts=SimpleNamespace(state=lambda flying, finished: ("prompts", "loader"), loader_state="config"),
        _schedule=SimpleNamespace(reference=lambda step: step - 2),
        _stages=SimpleNamespace(kl_coefficient=lambda step: 10.0 * step),
        _recorder=SimpleNamespace(state=dict),
        _bad_data=SimpleNamespace(state=dict),
    )
    state = SimpleNamespace(step=4, finished=lambda: iter(()), in_flight=lambda: [])
    kept = checkpointing._snapshot(state).state
    assert (kept.kl_coef, kept.reference) == (40.0, 3)
