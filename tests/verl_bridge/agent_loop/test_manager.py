# SPDX-License-Identifier: Apache-2.0
"""One call per group: it returns responses, or None once a recalled group has been given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from recipe.async_pipeline.core.groups.items import Group
from recipe.async_pipeline.core.groups.recall import Recall
from recipe.async_pipeline.errors import RolloutError
from tests import HANG_S

pytestmark = pytest.mark.real_engine

PROMPT = {"uid": "a"}


class Worker:
    """Answers when `answer` is set; `given_up` holds the groups that it had to give up."""

    def __init__(self, on_give_up: Callable[[asyncio.Future[Any]], object]) -> None:
        self.given_up: list[str] = []
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._on_give_up = on_give_up
        self.admitted: list[int] = []
        self.run_group = SimpleNamespace(remote=self._run_group)
        self.give_up = SimpleNamespace(remote=self._give_up)

    def _run_group(self, prompt: dict[str, Any], admitted: int) -> Awaitable[Any]:
        self.admitted.append(admitted)

        async def wait() -> Any:
            return await asyncio.shield(self.answer)

        return wait()

    async def _give_up(self, uid: str) -> None:
        self.given_up.append(uid)
        self._on_give_up(self.answer)


def manager_of(module: ModuleType, *workers: Any) -> Any:
    """Return verl's manager with workers that are not started."""

    async def start(self: Any) -> None:
        self.agent_loop_workers = list(workers)

    def init(self: Any, config: Any) -> None:
        self.config = config

    stock = module.PushAgentLoopManager.__mro__[1]
    with (
        mock.patch.multiple(stock, __init__=init, _init_agent_loop_workers=start),
        mock.patch.object(module, "open_requests_of", lambda config: SimpleNamespace(groups=1)),
    ):
        return module.PushAgentLoopManager.create(None)


def answered(*trajectories: Any) -> Any:
    return (Group(uid="a", step=1, trajectories=trajectories), "facts") if trajectories else None


async def until_begun() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_group_that_is_finished_is_returned(module: ModuleType) -> None:
    worker = Worker(lambda answer: None)
    worker.answer.set_result(answered("t"))
    assert await manager_of(module, worker).run_group(PROMPT, Recall(), 3) == answered("t")
    assert (worker.given_up, worker.admitted) == ([], [3])


async def test_an_error_of_the_rollout_is_passed_on(module: ModuleType) -> None:
    worker = Worker(lambda answer: None)
    worker.answer.set_exception(RolloutError("no replica"))
    with pytest.raises(RolloutError, match="no replica"):
        await manager_of(module, worker).run_group(PROMPT, Recall(), 3)


@pytest.mark.parametrize("stored", [False, True])
async def test_a_recalled_group_is_given_up_once(module: ModuleType, stored: bool) -> None:
    """What is in the sample store by then is returned, so that it can be cleared."""
    left = answered("t") if stored else answered()

    worker, recall = Worker(lambda answer: answer.set_result(left)), Recall()
    group = asyncio.create_task(manager_of(module, worker).run_group(PROMPT, recall, 3))
    await until_begun()
    recall.give("regenerate")
    assert await asyncio.wait_for(group, HANG_S) == (left if stored else None)
    assert worker.given_up == ["a"]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_worker_that_is_gone_has_nothing_to_give_up(
    module: ModuleType, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GIVE_UP_S", 0.01)

    def gone(answer: asyncio.Future[Any]) -> None:
        if fails:
            answer.set_exception(ConnectionError("dead"))
        raise ConnectionError("dead")

    worker, recall = Worker(gone), Recall()
    group = asyncio.create_task(manager_of(module, worker).run_group(PROMPT, recall, 3))
    await until_begun()
    recall.give("drop")
    assert await asyncio.wait_for(group, HANG_S) is None


@pytest.mark.parametrize("recalled", [False, True])
async def test_a_stop_is_no_recall(module: ModuleType, recalled: bool) -> None:
    worker, recall = Worker(lambda answer: None), Recall()
    group = asyncio.create_task(manager_of(module, worker).run_group(PROMPT, recall, 3))
    await until_begun()
    if recalled:
        recall.give("regenerate")
        await until_begun()
    group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(group, HANG_S)
    assert worker.given_up == ["a"]


async def test_a_group_is_repeated_if_its_connection_is_lost(module: ModuleType) -> None:
    """Through Ray then, which waits for the restart of the worker."""

    class Caller:
        def __init__(self) -> None:
            self.calls: list[tuple[Any, ...]] = []

        async def call(self, *call: Any) -> Any:
            self.calls.append(call)
            if len(self.calls) == 1:
                raise module.ConnectionLost
            return answered("t")

    caller = Caller()
    with mock.patch.object(module, "DirectCaller", lambda worker: caller):
        manager = manager_of(module, Worker(lambda answer: None))
    assert await manager.run_group(PROMPT, Recall(), 3) == answered("t")
    assert caller.calls == [("run_group", PROMPT, 3)] * 2


async def test_a_row_with_pictures_is_a_separate_argument(module: ModuleType) -> None:
    """Ray resolves references only there, and counts them only in its own calls."""
    calls: list[Any] = []

    class Caller:
        async def call(self, *call: Any) -> Any:
            calls.append(call)
            return answered("t")

    reference = module.ray.ObjectRef(bytes(28), skip_adding_local_ref=True)
    with mock.patch.object(module, "DirectCaller", lambda worker: Caller()):
        manager = manager_of(module, Worker(lambda answer: None))
    await manager.run_group({**PROMPT, module.STORED: reference}, Recall(), 3)
    assert calls == [("run_group", PROMPT, 3, reference)]


def test_workers_answer_control_calls_while_all_groups_are_open(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may get all groups in flight, twice: groups that were given up may still end."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        module.PushAgentLoopManager.__mro__[1],
        "__init__",
        lambda self, config: setattr(self, "config", config),
    )
    monkeypatch.setattr(module, "open_requests_of", lambda config: SimpleNamespace(groups=config))
    monkeypatch.setattr(module, "restartable", lambda cls, **options: asked.update(options, cls=cls))
    module.PushAgentLoopManager(3000)
    assert asked == {"cls": module.PushAgentLoopWorker, "groups": module.GROUPS, "max_concurrency": 6000}
    assert set(module.GROUPS) >= {"control", "give_up"}
    module.PushAgentLoopManager(1)
    assert asked["max_concurrency"] == module.DEFAULT_CONCURRENCY


def test_a_validation_lasts_until_all_workers_have_ended_it(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So Ray repeats what a worker that dies has not ended, or ends the run with its error."""
    asked: list[tuple[str, Any]] = []

    def get(calls: list[tuple[str, Any]]) -> list[Any]:
        asked.extend(calls)
        return [module.Validated([f"episode of {name}"], [f"attempt of {name}"]) for name, _ in calls]

    workers = [
        SimpleNamespace(run_validation=SimpleNamespace(remote=lambda part, name=name: (name, part)))
        for name in ("first", "second")
    ]
    manager = manager_of(module, *workers)
    monkeypatch.setattr(module.ray, "get", get)
    manager.generate_sequences(SimpleNamespace(chunk=lambda number: ["rows"] * (number - 1)))
    assert asked == [("first", "rows")], "a batch may have fewer prompts than there are workers"
    assert manager.take_validated() == (["episode of first"], ["attempt of first"])
    assert manager.take_validated() == ([], [])


async def test_workers_are_closed_also_if_one_hangs_and_one_is_dead(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.01)
    closed: list[str] = []

    async def close() -> None:
        closed.append("alive")

    async def hang() -> None:
        await asyncio.sleep(3600)

    async def fail() -> None:
        raise ConnectionError("dead")

    workers = [SimpleNamespace(close=SimpleNamespace(remote=one)) for one in (hang, fail, close)]
    manager = manager_of(module, *workers)
    await asyncio.wait_for(manager.close(), HANG_S)
    assert closed == ["alive"]


async def test_a_prompt_goes_to_the_worker_that_has_a_part_of_it(module: ModuleType) -> None:
    """Once; shards of an earlier process are dealt to the workers of this one."""
    read: list[tuple[str, list[str]]] = []

    def worker(number: int) -> Any:
        def resume(checkpoint: str, shards: list[str]) -> dict[str, int]:
            read.append((checkpoint, shards))
            return {f"{number}": 7}

        return SimpleNamespace(number=number, resume=SimpleNamespace(remote=resume))

    class Caller:
        def __init__(self, worker: Any) -> None:
            self._worker = worker

        async def call(self, *_: Any) -> Any:
            return answered(f"worker {self._worker.number}")

    with mock.patch.object(module, "DirectCaller", Caller):
        manager = manager_of(module, *map(worker, range(3)))
    with mock.patch.object(module, "got", lambda refs, *_, **__: refs):
        assert manager.resume(Path("/c"), ["s0", "s1", "s2", "s3"], 1.0) == {"0": 7, "1": 7, "2": 7}
    assert read == [("/c", ["s0", "s3"]), ("/c", ["s1"]), ("/c", ["s2"])]
    for uid, expected in (("1", 1), ("1", 0), ("another", 1), ("0", 0)):
        assert await manager.run_group({"uid": uid}, Recall(), 3) == answered(f"worker {expected}"), uid
