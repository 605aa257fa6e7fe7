# SPDX-License-Identifier: Apache-2.0
"""A request to TransferQueue neither counts the cores of the machine nor warns about their number. The rows
of a checkpoint are written and read by storage units, and are the same afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from recipe.async_pipeline.checkpoint import store as checkpoints
from recipe.async_pipeline.core.groups.items import Group, Trajectory
from recipe.async_pipeline.errors import CheckpointError
from recipe.async_pipeline.verl_bridge import replaced
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


def users(load: Load) -> tuple[ModuleType, ModuleType]:
    return load("transfer_queue.client"), load("transfer_queue.storage.simple_storage")


@pytest.fixture
def store(load: Load, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load("recipe.async_pipeline.verl_bridge.store.sample_store")
    common = load("transfer_queue.utils.common")
    monkeypatch.setattr(common, "psutil", psutil)
    for user in users(load):
        monkeypatch.setattr(user, "TQ_NUM_THREADS", 8)
    return module


@pytest.mark.parametrize("cores", [2, 64])
def test_the_cores_are_counted_once(
    load: Load,
    store: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cores: int,
) -> None:
    counted: list[bool] = []

    def count(logical: bool = True) -> int:
        counted.append(logical)
        return cores

    monkeypatch.setattr(psutil, "cpu_count", count)
    store.count_cores_once()
    with caplog.at_level(logging.WARNING):
        for user in users(load):
            assert user.TQ_NUM_THREADS == min(8, cores)
            with user.limit_pytorch_auto_parallel_threads(target_num_threads=user.TQ_NUM_THREADS):
                pass
    assert counted == [False]
    assert not caplog.records


def test_init_starts_the_classes_of_this_package(
    load: Load, store: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap = load("transfer_queue.storage.bootstrap.simple_storage_bootstrap")
    interface = load("transfer_queue.interface")
    places = [
        (bootstrap, "SimpleStorageUnit", store.PipelineSimpleStorageUnit),
        (interface, "TransferQueueController", store.PipelineTransferQueueController),
    ]
    stock = {name: getattr(module, name) for module, name, _ in places}
    for module, name, _ in places:
        monkeypatch.setattr(module, name, stock[name])
    replaced.apply("sample store")
    for module, name, ours in places:
        made: Any = getattr(module, name)
        assert issubclass(made.__ray_metadata__.modified_class, ours)
        assert made._default_options == stock[name]._default_options


SHAPES = [(3,), (4,), [3], (3, 2)]


@pytest.mark.parametrize("seed", range(20))
def test_a_column_forgets_samples_as_in_transfer_queue(store: ModuleType, seed: int) -> None:
    draw = random.Random(seed)
    kinds = SHAPES[: draw.randint(1, len(SHAPES))]
    ours, theirs = (store.controller.FieldMeta() for _ in range(2))
    for column in (ours, theirs):
        made = random.Random(seed)
        column.update(
            {
                "dtype": "int64",
                "is_nested": True,
                "per_sample_shapes": {i: made.choice(kinds) for i in range(9)},
            },
            list(range(9)),
        )
    left = list(range(9))
    while left:
        removed = draw.sample(left, draw.randint(1, min(3, len(left))))
        left = [index for index in left if index not in removed]
        store.remove_samples(ours, [*removed, 99])
        theirs.remove_samples([*removed, 99])
        assert ours == theirs


def test_a_column_looks_at_few_of_the_remaining_samples(store: ModuleType) -> None:
    seen: list[int] = []

    class Shape(tuple[int, ...]):
        def __eq__(self, other: object) -> bool:
            seen.append(1)
            return super().__eq__(other)

        __hash__ = tuple.__hash__

    column = store.controller.FieldMeta()
    shapes = {index: Shape((index % 2,)) for index in range(1000)}
    column.update({"dtype": "int64", "is_nested": True, "per_sample_shapes": shapes}, list(shapes))
    store.remove_samples(column, [0])
    assert len(seen) < 5


Start = Callable[[int], "Queue"]


class Queue:
    """The part of TransferQueue that checkpoints use: columns of samples by key, in storage units."""

    def __init__(self, units: list[Any]) -> None:
        self.units = units
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, Any] = {}

    def init(self) -> None:
        """Do nothing: it is there."""

    def indexes_of(self, keys: list[str], partition: str) -> list[int | None]:
        """Answer as the controller does."""
        known = [*self.rows]
        return [known.index(key) if key in self.rows else None for key in keys]

    def kv_batch_put(self, *, keys: list[str], partition_id: str, fields: Any, tags: Any = None) -> None:
        for name in fields.keys():
            column = fields[name]
            values = column.unbind(0) if hasattr(column, "unbind") else column
            for key, value in zip(keys, values, strict=True):
                self.rows.setdefault(key, {})[name] = value
        self.tags.update(zip(keys, tags or [], strict=False))
        for key in keys:
            index = [*self.rows].index(key)
            if self.units:
                columns = {name: [value] for name, value in self.rows[key].items()}
                self.units[index % len(self.units)].storage_data.put_data(columns, [index])

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        """Return the columns that exist."""
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        names = [name for name in select_fields if name in self.rows[keys[0]]]
        return list_of_dict_to_tensordict([{name: self.rows[key][name] for name in names} for key in keys])


@pytest.fixture
def start(store: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a function that makes an empty queue with so many storage units.

    0 stands for a backend without them.
    """

    def make(number: int) -> Queue:
        size = {"total_storage_size": 1000, "num_data_storage_units": number}
        units = [store.PipelineSimpleStorageUnit(size) for _ in range(number)]
        made = Queue(units)
        act_here(store, monkeypatch, units, made)
        monkeypatch.setattr(store, "tq", made)
        return made

    return make


def act_here(store: ModuleType, monkeypatch: pytest.MonkeyPatch, units: list[Any], controller: Any) -> None:
    """Have storage units and a controller of this process stand for Ray's actors."""

    class Remote:
        """Calls in this process; the result stands for its reference."""

        def __init__(self, method: Any, *, waits: bool) -> None:
            self._method, self._waits = method, waits

        def remote(self, *args: Any) -> Any:
            async def call() -> Any:
                return self._method(*args)

            return call() if self._waits else self._method(*args)

    def get_actor(name: str, namespace: str | None = None) -> Any:
        if (name, namespace) == store.CONTROLLER:
            return SimpleNamespace(indexes_of=Remote(controller.indexes_of, waits=False))
        rank = int(name.removeprefix("TransferQueueStorageUnit#"))
        if rank >= len(units):
            raise ValueError(f"no actor {name}")
        return SimpleNamespace(
            note_rows=Remote(units[rank].note_rows, waits=False),
            write_rows=Remote(units[rank].write_rows, waits=True),
            restore_rows=Remote(units[rank].restore_rows, waits=False),
        )

    monkeypatch.setattr(store, "ray", SimpleNamespace(get_actor=get_actor, put=lambda value: value))
    monkeypatch.setattr(store, "got", lambda refs, *_, **__: refs)


def start_transfer_queue(load: Load, store: ModuleType, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Start TransferQueue's own controller, storage units and client in this process."""
    from omegaconf import OmegaConf

    interface = load("transfer_queue.interface")
    controller = store.PipelineTransferQueueController(sampler=interface.SequentialSampler())
    size = {"total_storage_size": 1000, "num_data_storage_units": number}
    units = [store.PipelineSimpleStorageUnit(size) for _ in range(number)]
    addresses = {f"unit {rank}": unit.zmq_server_info for rank, unit in enumerate(units)}
    client = load("transfer_queue.client").TransferQueueClient("a test", controller.zmq_server_info)
    config = OmegaConf.create({"zmq_info": addresses}, flags={"allow_objects": True})
    client.initialize_storage_manager("SimpleStorage", config)
    monkeypatch.setattr(interface, "_TQ_CLIENT", client)
    monkeypatch.setattr(store.tq, "init", lambda: None)
    act_here(store, monkeypatch, units, controller)


@pytest.fixture
def queue(start: Start) -> Queue:
    return start(0)


def sample(length: int) -> dict[str, Any]:
    import torch

    return {
        "responses": torch.arange(length),
        "conditions": torch.rand(length).bfloat16() if length % 2 else torch.rand(0).bfloat16(),
        "rollout_log_probs": torch.rand(length),
        "raw_prompt": [{"role": "user", "content": f"{length}+1="}],
        "extra_fields": {"version_spans": [[0, 0]], "reward_extra_info": {"acc": np.float32(0.5)}},
        "nothing": None,
    }


def finished(queue: Queue, count: int = 5) -> list[Group]:
    """Return groups of two responses, whose rows are in the store, as well as one of another group."""
    groups = []
    for number in range(count):
        keys = [f"p{number}_{i}_0" for i in range(2)]
        rows = [sample(2 + number + i) for i in range(2)]
        if number % 2:
            # Each response has its own columns.
            rows[1]["another"] = number
        for key, row in zip(keys, rows, strict=True):
            queue.kv_batch_put(keys=[key], partition_id="train", fields={n: [v] for n, v in row.items()})
        payload = [sorted(row) for row in rows] if number % 2 else [sorted(rows[0])]
        responses = tuple(
            Trajectory(key=key, first_version=0, last_version=0, num_tokens=3, payload={"status": "success"})
            for key in keys
        )
        groups.append(Group(uid=f"p{number}", step=3, trajectories=responses, payload=payload))
    queue.kv_batch_put(keys=["other"], partition_id="train", fields={"responses": [1]})
    return groups


def save(
    store: ModuleType, groups: list[Group], root: Path, change: Any = lambda: None
) -> tuple[Path, list[str]]:
    """Write a checkpoint of the rows of groups; `change` happens once they are noted."""
    part = checkpoints.begin(root, 2)
    writers = store.note(groups, "train")
    change()
    names = [f"samples/rank_{rank}" for rank in range(len(writers))]

    async def write() -> list[Any]:
        return [await one(str(part), name) for one, name in zip(writers, names, strict=True)]

    entries = {entry.path: entry for files in asyncio.run(write()) for entry in files}
    facts: dict[str, Any] = {
        "step": 2,
        "run": "r",
        "identity": {},
        "saved_unix": 0.0,
        "epoch": 1,
        "record": 1,
    }
    return checkpoints.publish(part, known=entries, **facts), names


def equal(one: Any, other: Any) -> bool:
    import torch

    return torch.equal(one, other) if isinstance(other, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (3, 1), (0, 0), (2, 0), (0, 2)])
def test_rows_survive_in_any_number_of_units(
    start: Start, store: ModuleType, tmp_path: Path, before: int, after: int
) -> None:
    """Also if training frees them once they are noted."""
    queue = start(before)
    groups, rows = finished(queue), dict(queue.rows)

    def free() -> None:
        for unit in queue.units:
            unit.storage_data.clear([*range(len(rows))])

    folder, shards = save(store, groups, tmp_path, free)
    assert len(shards) == max(1, before)
    checkpoints.verify(folder, {}, contents=True)

    queue = start(after)
    store.restore(folder, shards, groups, "train", 1.0)
    keys = {one.key for group in groups for one in group.trajectories}
    assert queue.rows.keys() == queue.tags.keys() == keys
    assert all(tag == {"status": "success"} for tag in queue.tags.values())
    for key in keys:
        assert all(equal(queue.rows[key][name], value) for name, value in rows[key].items()), key
        assert queue.rows[key].keys() == rows[key].keys()


@pytest.mark.slow
def test_rows_survive_in_transfer_queue(
    load: Load, store: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its numbers of rows, its units and what these hold are what this package expects."""
    start_transfer_queue(load, store, monkeypatch, 2)
    rows = {f"p{number}_0_0": sample(2 + number) for number in range(5)}
    tags = {key: {"status": "success"} for key in rows}
    store.put(rows, tags, "train")
    responses = [
        Trajectory(key=key, first_version=0, last_version=0, num_tokens=3, payload=tag)
        for key, tag in tags.items()
    ]
    groups = [
        Group(uid=one.key, step=3, trajectories=(one,), payload=[sorted(sample(1))]) for one in responses
    ]
    folder, shards = save(
        store, groups, tmp_path, lambda: store.tq.kv_clear(keys=[*rows], partition_id="train")
    )
    assert store.tq.kv_list("train") == {"train": {}}

    start_transfer_queue(load, store, monkeypatch, 3)
    store.restore(folder, shards, groups, "train", 1.0)
    assert store.tq.kv_list("train") == {"train": tags}
    again = store.fetch(groups, "train")
    for key, row in rows.items():
        assert all(equal(again[key][name], value) for name, value in row.items()), key


def test_columns_of_later_stages_are_not_written(start: Start, store: ModuleType, tmp_path: Path) -> None:
    """And the mask is the one that the rollout wrote."""
    import torch

    queue = start(2)
    rows = {"response_mask": [torch.zeros(2)], "loss_mask": [torch.ones(2)], "old_log_probs": [torch.ones(2)]}
    queue.kv_batch_put(keys=["a"], partition_id="train", fields=rows)
    one = Trajectory(key="a", first_version=0, last_version=0, num_tokens=2, payload={})
    group = Group(uid="p", step=3, trajectories=(one,), payload=[["response_mask", "loss_mask"]])
    folder, shards = save(store, [group], tmp_path)
    queue = start(1)
    store.restore(folder, shards, [group], "train", 1.0)
    assert queue.rows["a"].keys() == {"response_mask", "loss_mask"}
    assert queue.rows["a"]["response_mask"].tolist() == [1.0, 1.0]


def test_images_of_earlier_versions_have_their_own_conditions(
    start: Start, store: ModuleType, tmp_path: Path
) -> None:
    queue = start(1)
    queue.kv_batch_put(keys=["a"], partition_id="train", fields={"condition_pooled": [1.0]})
    one = Trajectory(key="a", first_version=0, last_version=0, num_tokens=2, payload={})
    group = Group(uid="p", step=3, trajectories=(one,), payload=[["condition_pooled"]])
    folder, shards = save(store, [group], tmp_path)
    queue = start(1)
    store.restore(folder, shards, [group], "train", 1.0)
    assert queue.rows["a"] == {"condition_pooled": 1.0, "conditions_in": "a"}


def test_a_checkpoint_of_format_2_is_read(
    start: Start, store: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The trainer had written all samples into one shard."""
    queue = start(0)
    groups, rows = finished(queue, 1), dict(queue.rows)
    part = checkpoints.begin(tmp_path, 2)
    store.tensor_tree.write_shard(str(part), "samples", store.fetch(groups, "train"))
    monkeypatch.setattr(checkpoints, "FORMAT", 2)
    facts: dict[str, Any] = {"step": 2, "run": "r", "identity": {}, "saved_unix": 0.0}
    folder = checkpoints.publish(part, epoch=1, record=1, **facts)
    monkeypatch.undo()
    assert checkpoints.verify(folder, {}, contents=True).format == 2

    queue = start(2)
    store.restore(folder, ("samples",), groups, "train", 1.0)
    assert {*queue.rows} == {"p0_0_0", "p0_1_0"}
    assert all(equal(queue.rows["p0_1_0"][name], value) for name, value in rows["p0_1_0"].items())


def test_a_row_that_is_nowhere_is_an_error(start: Start, store: ModuleType, tmp_path: Path) -> None:
    queue = start(2)
    groups = finished(queue)
    queue.units[1].storage_data.clear([1])
    with pytest.raises(CheckpointError, match="the storage units have 9 of 10 rows"):
        store.note(groups, "train")
    del queue.rows["p0_0_0"]
    with pytest.raises(CheckpointError, match="the sample store has 7 of 8 rows of finished groups"):
        store.note(groups, "train")


@pytest.mark.parametrize("units", [0, 2])
def test_damaged_and_incomplete_shards_are_refused(
    start: Start, store: ModuleType, tmp_path: Path, units: int
) -> None:
    queue = start(units)
    groups = finished(queue)
    folder, shards = save(store, groups[:-1], tmp_path)
    with pytest.raises(CheckpointError, match="lacks the samples of 2 responses of its state, e.g. p4_0_0"):
        store.restore(folder, shards, groups, "train", 1.0)
    with pytest.raises(CheckpointError, match="is damaged: samples/rank_9 is missing; move it away"):
        store.restore(folder, ["samples/rank_9"], groups, "train", 1.0)
    path = folder / f"{shards[-1]}.msgpack"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(CheckpointError, match=f"the contents of {shards[-1]}.msgpack differ"):
        store.restore(folder, shards, groups, "train", 1.0)


def test_a_row_that_cannot_be_written_is_an_error(start: Start, store: ModuleType, tmp_path: Path) -> None:
    queue = start(1)
    groups = finished(queue, 1)
    queue.units[0].storage_data.field_data["extra_fields"][0] = {"tool": SimpleNamespace()}
    with pytest.raises(CheckpointError, match="SimpleNamespace cannot be written without pickle"):
        save(store, groups, tmp_path)


class Meta:
    """The part of a batch's metadata that the reward stage reads."""

    partition_id = "train"

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)


REJECTION = {"rollout_rs": "token_k1,seq_mean_k1", "rollout_rs_threshold": "0.6_1.6,0.8_1.25"}


def masked_sample(uid: str, length: int, seed: int) -> dict[str, Any]:
    """Return the columns of one output of an agent loop, with a tool's tokens masked."""
    import torch

    torch.manual_seed(seed)
    mask = torch.ones(length, dtype=torch.int64)
    mask[length // 2] = 0
    return {
        "uid": uid,
        "responses": torch.arange(length),
        "response_mask": mask,
        "loss_mask": mask,
        "rm_scores": torch.nn.functional.pad(torch.rand(1), (length - 1, 0)),
        "rollout_log_probs": -torch.rand(length),
    }


@pytest.mark.parametrize("rejection", [None, REJECTION])
@pytest.mark.parametrize("outputs", [1, 3])
def test_a_resumed_step_trains_the_tokens_of_the_undisturbed_one(
    store: ModuleType,
    queue: Queue,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    rejection: dict[str, str] | None,
    outputs: int,
) -> None:
    """The step has passed verl's reward stage before its samples are saved."""
    import torch
    from omegaconf import OmegaConf

    from recipe.async_pipeline.core.groups.items import Trajectory

    base = load("verl.trainer.ppo.v1.trainer_base")
    monkeypatch.setattr(base, "tq", queue)
    algorithm: dict[str, Any] = {"use_kl_in_reward": False, "adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0}
    algorithm["rollout_correction"] = rejection and {"bypass_mode": False, **rejection}
    settings = {"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 2}}}
    trainer = SimpleNamespace(config=OmegaConf.create(settings))

    keys = [f"p0_{session}_{i}" for session in range(2) for i in range(outputs)]
    for number, key in enumerate(keys):
        queue.rows[key] = masked_sample("p0", 9 + number, number)
    columns = sorted(queue.rows[keys[0]])
    responses = [
        Trajectory(key=key, first_version=0, last_version=0, num_tokens=9, payload={}) for key in keys
    ]
    group = Group(uid="p0", step=3, trajectories=tuple(responses), payload=[columns])

    def reward_stage(seed: int) -> tuple[list[list[int]], list[list[float]], dict[str, Any]]:
        """Return the tokens to train, their advantages and the metrics, for old log-probs of `seed`."""
        torch.manual_seed(seed)
        metrics: dict[str, Any] = {}
        for key in keys:
            sampled = queue.rows[key]["rollout_log_probs"]
            queue.rows[key]["old_log_probs"] = sampled + 0.5 * torch.randn(len(sampled))
        base.PPOTrainer._compute_advantage(trainer, Meta(keys), metrics)
        rows = [queue.rows[key] for key in keys]
        return [r["response_mask"].tolist() for r in rows], [r["advantages"].tolist() for r in rows], metrics

    stored = [queue.rows[key]["response_mask"].tolist() for key in keys]
    ahead, *_ = reward_stage(seed=1)
    assert (ahead != stored) is (rejection is not None)
    samples = store.fetch([group], "train")

    # The run that continues has the log-probs of the saved weights, as the resumed one.
    for row in queue.rows.values():
        row["response_mask"] = row["loss_mask"]
    undisturbed = reward_stage(seed=2)

    queue.rows = {}
    store.put(samples, {key: {} for key in keys}, "train")
    assert [queue.rows[key]["response_mask"].tolist() for key in keys] == stored
    assert all(sorted(row) == columns for row in queue.rows.values())
    assert reward_stage(seed=2) == undisturbed
