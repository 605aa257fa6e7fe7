# SPDX-License-Identifier: Apache-2.0
"""Workers that compute reference log-probs die: new ones hold the reference that is due, or the run ends.

Whole jobs test the log-probs themselves, see tests/e2e/test_pools.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError

from recipe.async_pipeline.core.groups.items import StepBatch
from recipe.async_pipeline.core.schedule import Schedule
from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.engine.shard_load import RankLoad
from recipe.async_pipeline.weight_sync.memory.manifest import WeightTicket
from tests.conftest import Load

pytestmark = pytest.mark.real_engine
EVERY = 4


class Group:
    """Two ranks whose weights are the number of a version."""

    def __init__(self, run: Run) -> None:
        self.workers = (self, self)
        self.weights, self._run = 0, run

    def load_version(self, ticket: WeightTicket, *_: Any) -> list[RankLoad]:
        self._run.call("load")
        self.weights = ticket.version
        return [RankLoad(ticket.version, 1)] * 2

    def save_reference(self, folder: str) -> None:
        Path(folder).mkdir(parents=True)
        for rank in range(2):
            Path(folder, f"rank_{rank}").write_text(str(self.weights))
            self._run.call("save")

    def load_reference(self, folder: str) -> None:
        self._run.call("load from disk")
        self.weights = int(Path(folder, "rank_1").read_text())


class Run:
    """A run that trains at once, with a reference that is replaced every `EVERY` steps."""

    def __init__(
        self, load: Load, module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, apart: bool
    ) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, Exception] = {}
        """What the next call of a name raises."""
        self.lines: list[str] = []
        self.used: list[int] = []
        """The weights that computed each step."""
        self.folder = tmp_path / "reference"
        self.schedule = Schedule(batch=1, last_step=100, ref_refresh_every=EVERY)
        pool = SimpleNamespace(memories_for=lambda ticket: None, has_copy=lambda *_: None, retire=self.retire)
        calls = load("recipe.async_pipeline.verl_bridge.calls.ray_calls").BlockingCalls(60.0)
        publishing = load("recipe.async_pipeline.verl_bridge.trainer.weight_publisher")
        actor = SimpleNamespace(gather_weights=lambda version: [ticket_of(version)])
        self.publisher = publishing.WeightPublisher(actor, pool, calls, 1.0)
        monkeypatch.setattr(module, "say", self.lines.append)
        monkeypatch.setattr(module, "nodes_of", lambda workers: ["a node"])
        monkeypatch.setattr(module, "start_group", lambda *_: Group(self))
        monkeypatch.setattr(module, "end_group", lambda group: None)
        monkeypatch.setattr(load("recipe.async_pipeline.verl_bridge.workers.log_prob_group"), "BACK_OFF_S", 0)
        config = OmegaConf.create({"actor_rollout_ref": {"model": {}, "actor": {"strategy": "fsdp2"}}})
        own = SimpleNamespace(name="reference") if apart else None
        self.log_probs = module.LogProbs(
            config=config,
            placement=SimpleNamespace(own_pool_of=lambda stage: own),
            schedule=self.schedule,
            stages=self,
            calls=calls,
            publisher=self.publisher,
            pools=lambda: {"pipeline_reference": None},
            old_group=None,
            reference_group=Group(self),
            folder=self.folder,
            note=lambda *_, **__: None,
        )

    def call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise self.fails.pop(name)

    async def retire(self, version: int) -> None:
        return None

    def at(self, step: int) -> Any:
        return SimpleNamespace(_compute_ref_log_prob=None)

    async def run_on_workers(self, batch: StepBatch, stage: Any, name: str) -> StepBatch:
        self.call("compute")
        self.used.append(self.log_probs.reference_group.weights)
        return batch

    def steps(self, first: int, last: int) -> list[int]:
        """Compute the reference's log-probs of some steps, train them and gather their versions.

        Returns the weights that were used.
        """

        async def main() -> None:
            for step in range(first, last + 1):
                await self.log_probs.reference(StepBatch(step=step, groups=()))
                await self.publisher.gather(step)

        before = len(self.used)
        asyncio.run(main())
        return self.used[before:]

    def kept(self) -> list[str]:
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("rank_*"))


def ticket_of(version: int) -> WeightTicket:
    return WeightTicket(version=version, board="b", pid=1, num_bytes=8, gather_s=0.1)


Make = Callable[..., Run]


@pytest.fixture
def make(load: Load, module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    return lambda *, apart=True: Run(load, module, monkeypatch, tmp_path, apart=apart)


def test_new_workers_get_a_reference_that_memory_no_longer_holds(make: Make) -> None:
    run = make()
    assert run.steps(1, 7) == [0, 0, 0, 0, 4, 4, 4]
    run.fails["compute"] = ActorDiedError()
    assert run.steps(8, 8) == [4]
    assert run.calls[-3:] == ["compute", "load from disk", "compute"]
    assert run.steps(9, 10) == [8, 8]


@pytest.mark.parametrize("step", [*range(1, 14)])
@pytest.mark.parametrize("moment", ["load", "save", "compute"])
def test_no_death_changes_the_reference_of_any_step(make: Make, step: int, moment: str) -> None:
    run = make()
    expected = [run.schedule.reference(each) or 0 for each in range(1, 15)]
    before = run.steps(1, step - 1)
    run.fails[moment] = ActorDiedError()
    assert before + run.steps(step, 14) == expected
    assert run.kept() == ["version_12/rank_0", "version_12/rank_1"], "only the newest one"


def test_a_first_reference_is_not_kept(make: Make) -> None:
    run = make()
    run.steps(1, EVERY)
    run.fails["compute"] = ActorDiedError()
    assert run.steps(EVERY, EVERY) == [0]
    assert run.kept() == [] and "save" not in run.calls


def test_a_reference_is_kept_once(make: Make) -> None:
    run = make()
    run.steps(1, 8)
    assert run.calls.count("save") == 2, "once by each rank"


def test_a_reference_of_a_single_step_is_not_kept(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make()
    object.__setattr__(run.schedule, "ref_refresh_every", 1)
    assert run.steps(1, 5) == [0, 1, 2, 3, 4]
    run.fails["compute"] = ActorDiedError()
    assert run.steps(6, 6) == [5]
    assert "save" not in run.calls


def test_a_reference_on_the_training_devices_is_not_kept(make: Make) -> None:
    run = make(apart=False)
    assert run.steps(1, 6) == [0, 0, 0, 0, 4, 4]
    assert "save" not in run.calls
    run.fails["compute"] = ActorDiedError()
    with pytest.raises(ActorDiedError):
        run.steps(7, 7)


def test_a_full_disk_ends_the_run_only_if_a_worker_dies(make: Make) -> None:
    run = make()
    run.fails["save"] = OSError(28, "No space left on device")
    assert run.steps(1, 7) == [0, 0, 0, 0, 4, 4, 4]
    assert run.kept() == [], "what was written would fill the disk further"
    assert run.calls.count("save") == 1, "it is tried once"
    (line,) = run.lines
    assert "version 4, cannot be kept on disk" in line and "No space left on device" in line

    run.fails["compute"] = ActorDiedError()
    with pytest.raises(WeightSyncError, match=r"version 4, .*kept on disk \(OSError: .*No space left"):
        run.steps(8, 8)


def test_after_a_full_disk_the_next_reference_is_kept(make: Make) -> None:
    run = make()
    run.fails["save"] = OSError(28, "No space left on device")
    run.steps(1, 8)
    run.fails["save"] = OSError(28, "No space left on device")
    run.steps(9, 12)
    assert len(run.lines) == 1, "it warns once"
    run.steps(13, 15)
    run.fails["compute"] = ActorDiedError()
    assert run.steps(16, 16) == [12]


def test_an_error_that_the_disk_has_not_caused_ends_the_run(make: Make) -> None:
    run = make()
    run.fails["save"] = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError, match="shapes differ"):
        run.steps(1, 5)


def test_a_resumed_reference_is_kept_at_once(make: Make) -> None:
    """Memory never held it in this process."""
    run = make()
    policy = run.log_probs.copies["ref_logp"]
    policy.group.weights = policy.version = 4
    run.log_probs.keep_reference()
    run.fails["compute"] = ActorDiedError()
    assert run.steps(7, 8) == [4, 4]


def test_nothing_is_left_on_disk(make: Make) -> None:
    run = make()
    run.steps(1, 6)
    assert run.kept()
    run.log_probs.close()
    assert not run.folder.exists()
