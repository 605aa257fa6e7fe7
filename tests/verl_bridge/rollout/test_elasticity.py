# SPDX-License-Identifier: Apache-2.0
"""Replicas are added and removed on request, and where devices are free; in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.config.knobs.schema import FleetConfig
from recipe.async_pipeline.observe.run_directory.replica_requests import FOLDER
from recipe.async_pipeline.verl_bridge.rollout.elasticity import GROW_EVERY_S, LOOK_EVERY_S, Elasticity
from tests.fakes.consumers import LOAD_S, RESTART_S, Replica, distribute, newcomer, publish

pytestmark = pytest.mark.virtual_time

Nodes = dict[str, tuple[str, int]]


class Pool:
    """Stands for the replica pool: its newcomers take a free place of the first node that has one."""

    def __init__(self, nodes: Nodes, *scripts: dict[str, Any]) -> None:
        self.nodes, self._scripts = nodes, list(scripts)
        self.fleet = distribute(Replica("replica 0"))
        self._made = 1

    def add_replica(self) -> str:
        script = self._scripts.pop(0) if self._scripts else {}
        made = newcomer(f"replica {self._made}", **script)
        self._made += 1
        node = next(node for node, (_, fits) in self.nodes.items() if fits)
        address, fits = self.nodes[node]
        self.nodes[node] = (address, fits - 1)
        self.fleet.add(made)
        return made.name

    def waiting_for_devices(self) -> int:
        return 0

    def nodes_of(self, name: str) -> tuple[str, ...]:
        return ("n0",)


async def call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def elastic(pool: Pool, tmp_path: Path, said: list[str] | None = None, **settings: Any) -> Elasticity:
    say = (said if said is not None else []).append
    return Elasticity(pool, tmp_path, FleetConfig(**settings), say, call, lambda: dict(pool.nodes))  # type: ignore[arg-type]


async def asked(tmp_path: Path, **request: Any) -> dict[str, Any]:
    """Return the answer to a request."""
    folder = tmp_path / FOLDER
    (folder / "request-1.json").write_text(json.dumps(request))
    await asyncio.sleep(LOOK_EVERY_S + 0.1)
    answer: dict[str, Any] = json.loads((folder / "answer-1.json").read_text())
    return answer


async def test_a_disk_that_fails_for_a_moment_ends_no_run(tmp_path: Path) -> None:
    pool, said = Pool({"n0": ("10.0.0.1", 1)}), list[str]()
    await publish(pool.fleet, 3)
    (tmp_path / FOLDER).touch()  # the folder cannot be made
    task = asyncio.create_task(elastic(pool, tmp_path, said).run())
    await asyncio.sleep(3 * LOOK_EVERY_S)
    assert len(said) == 1 and said[0].startswith(
        "replicas cannot be listed, added or removed: FileExistsError"
    )
    (tmp_path / FOLDER).unlink()
    await asyncio.sleep(LOOK_EVERY_S)
    assert (await asked(tmp_path, action="list"))["replicas"][0]["name"] == "replica 0"

    (tmp_path / FOLDER / "other").mkdir()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_replicas_are_listed_added_and_removed(tmp_path: Path) -> None:
    pool = Pool({"n0": ("10.0.0.1", 1)})
    await publish(pool.fleet, 3)
    task = asyncio.create_task(elastic(pool, tmp_path).run())
    await asyncio.sleep(0)
    row = {"name": "replica 0", "node": "10.0.0.1", "state": "serving", "version": 3, "open_requests": 0}
    answer = await asked(tmp_path, action="list")
    assert answer == {"max_replicas": 0, "replicas": [{**row, "load_s": LOAD_S, "why": ""}]}

    answer = await asked(tmp_path, action="add", count=1)
    assert answer["added"] == ["replica 1"]
    assert [one["state"] for one in answer["replicas"]] == ["serving", "joining"]
    await asyncio.sleep(RESTART_S + LOAD_S + 1)
    assert pool.fleet.versions == {"replica 0": 3, "replica 1": 3}

    answer = await asked(tmp_path, action="remove", name="replica 0")
    assert answer["removed"] == "replica 0"
    await asyncio.sleep(10)
    assert [m.name for m in pool.fleet.members] == ["replica 1"]

    task.cancel()
    await asyncio.wait([task])
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"action": "add", "count": 0}, "--add must be >= 1, got 0"),
        ({"action": "add", "count": 2}, "2 more replicas do not fit: "),
        ({"action": "add", "count": 5}, "max_replicas is 4 and there are 1 replicas, so 5 more are too many"),
        ({"action": "add"}, "'count'"),
        ({"action": "add", "count": "x"}, "invalid literal"),
        ({"action": "remove", "name": "replica 9"}, "there is no replica 9; the run has replica 0"),
        ({"action": "remove", "name": "replica 0"}, "replica 0 cannot leave: no other replica serves"),
    ],
)
async def test_what_cannot_be_done_is_refused(tmp_path: Path, request_: dict[str, Any], said: str) -> None:
    pool = Pool({"n0": ("10.0.0.1", 1)})
    await publish(pool.fleet, 0)
    task = asyncio.create_task(elastic(pool, tmp_path, max_replicas=4).run())
    await asyncio.sleep(0)
    assert said in (await asked(tmp_path, **request_))["error"]
    assert [m.name for m in pool.fleet.members] == ["replica 0"]
    task.cancel()


async def test_replicas_are_added_where_a_node_joins_until_the_limit(tmp_path: Path) -> None:
    pool = Pool({"n0": ("10.0.0.1", 0)})
    await publish(pool.fleet, 0)
    task = asyncio.create_task(elastic(pool, tmp_path, max_replicas=3).run())
    await asyncio.sleep(3 * GROW_EVERY_S)
    assert len(pool.fleet.members) == 1, "no device is free"
    pool.nodes["n1"] = ("10.0.0.2", 1)
    await asyncio.sleep(GROW_EVERY_S)
    assert len(pool.fleet.members) == 2
    pool.nodes["n2"] = ("10.0.0.3", 8)
    await asyncio.sleep(GROW_EVERY_S + RESTART_S + LOAD_S + 1)
    assert set(pool.fleet.versions) == {"replica 0", "replica 1", "replica 2"}
    await asked(tmp_path, action="remove", name="replica 1")
    await asyncio.sleep(5 * GROW_EVERY_S)
    assert set(pool.fleet.versions) == {"replica 0", "replica 2"}, "it does not grow again by itself"
    assert (await asked(tmp_path, action="add", count=1))["added"] == ["replica 3"]
    task.cancel()


async def test_a_replica_over_two_nodes_needs_room_on_both(tmp_path: Path) -> None:
    pool = Pool({"n0": ("10.0.0.1", 1)})
    await publish(pool.fleet, 0)
    fleet = Elasticity(
        pool,  # type: ignore[arg-type]
        tmp_path,
        FleetConfig(),
        lambda text: None,
        call,
        lambda: dict(pool.nodes),
        nodes_of_a_replica=2,
    )
    task = asyncio.create_task(fleet.run())
    await asyncio.sleep(0)
    assert "have room for 0;" in (await asked(tmp_path, action="add", count=1))["error"]
    pool.nodes["n1"] = ("10.0.0.2", 1)
    assert (await asked(tmp_path, action="add", count=1))["added"] == ["replica 1"]
    task.cancel()


async def test_a_node_on_which_a_replica_fails_is_not_tried_again_before_another_one_joins(
    tmp_path: Path,
) -> None:
    pool = Pool({"n0": ("10.0.0.1", 8)}, {"restarts": ["raise"]})
    await publish(pool.fleet, 0)
    task = asyncio.create_task(elastic(pool, tmp_path, max_replicas=2).run())
    await asyncio.sleep(20 * GROW_EVERY_S)
    assert set(pool.fleet.versions) == {"replica 0"}
    pool.nodes["n1"] = ("10.0.0.2", 8)
    await asyncio.sleep(GROW_EVERY_S + RESTART_S + LOAD_S + 1)
    assert set(pool.fleet.versions) == {"replica 0", "replica 2"}
    task.cancel()


async def test_a_run_does_not_end_because_it_cannot_grow(tmp_path: Path) -> None:
    said: list[str] = []

    settings, broken = FleetConfig(max_replicas=2), lambda: 1 / 0
    made = Elasticity(Pool({}), tmp_path, settings, said.append, call, broken)  # type: ignore[arg-type]
    task = asyncio.create_task(made.run())
    await asyncio.sleep(5 * GROW_EVERY_S)
    assert not task.done()
    task.cancel()
    assert said == ["replicas cannot be listed, added or removed: ZeroDivisionError: division by zero"]
