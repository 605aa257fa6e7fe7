# SPDX-License-Identifier: Apache-2.0
"""The contents of a checkpoint can be read back, samples included; incomplete ones are rejected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipe.async_pipeline.checkpoint.store import verify
from recipe.async_pipeline.core.flow_state import FlowState
from recipe.async_pipeline.core.items import Group
from recipe.async_pipeline.errors import CheckpointError
from tests.conftest import Load
from tests.fakes.lives import Life
from tests.fakes.trainer import SimTrainer

pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module")
def contents(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.trainer.checkpoint_contents")


class Store:
    """The part of TransferQueue that checkpoints use: columns of samples by key."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, Any] = {}

    def kv_batch_put(self, *, keys: list[str], partition_id: str, fields: Any, tags: Any = None) -> None:
        for name in fields.keys():
            column = fields[name]
            for key, value in zip(
                keys, column.unbind(0) if hasattr(column, "unbind") else column, strict=True
            ):
                self.rows.setdefault(key, {})[name] = value
        self.tags.update(zip(keys, tags or [], strict=False))

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        return list_of_dict_to_tensordict(
            [{name: self.rows[key][name] for name in select_fields} for key in keys]
        )


@pytest.fixture
def store(contents: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(contents, "tq", made)
    return made


def sample(length: int) -> dict[str, Any]:
    import torch

    return {
        "responses": torch.arange(length),
        "rollout_log_probs": torch.rand(length),
        "raw_prompt": [{"role": "user", "content": f"{length}+1="}],
        "extra_fields": {"version_spans": [[0, 0]], "reward_extra_info": {"acc": np.float32(0.5)}},
        "nothing": None,
    }


def flow_state(store: Store) -> FlowState:
    """Return the state of a run that is far ahead, with samples of all finished groups in the store."""
    trainer = SimTrainer(max_lag=4, steps=6, groups=2, save_every=2, costs={"assemble": 3.0})
    flow = Life(trainer).checkpoints[0].flow
    for number, group in enumerate(flow.finished()):
        for i, one in enumerate(group.trajectories):
            store.rows[one.key] = sample(2 + number + i)
    return flow


def with_columns(group: Group) -> Group:
    import dataclasses

    responses = tuple(
        dataclasses.replace(one, payload={"status": "success", "response_len": np.int64(3)})
        for one in group.trajectories
    )
    alike = sum(group.uid.encode()) % 2
    return dataclasses.replace(
        group, trajectories=responses, payload=[sorted(sample(1))] * (1 if alike else len(responses))
    )


def snapshot(
    contents: ModuleType, flow: FlowState, reject: Callable[[Group], bool] = lambda group: False
) -> Any:
    import dataclasses

    queue = flow.queue
    flow = dataclasses.replace(
        flow,
        queue=dataclasses.replace(
            queue,
            entries=tuple(
                dataclasses.replace(
                    e, group=e.group and with_columns(e.group), answer=e.answer and with_columns(e.answer)
                )
                for e in queue.entries
            ),
            taken={step: tuple(map(with_columns, groups)) for step, groups in queue.taken.items()},
        ),
    )
    groups = [group for group in flow.finished() if not reject(group)]
    prompts = contents.PromptSourceState(before=0, drawn=3, places={}, undealt=[], in_flight=flow.in_flight())
    state = contents.RunState(
        flow=flow,
        prompts=prompts,
        kept=tuple(g.uid for g in groups),
        reference=None,
        kl_coef=0.25,
        meters={"x": [1.5]},
    )
    request = contents.RecordedRequest([1], [2], [-0.5], [[0, 0]], None, "replica 0")
    return contents.Snapshot(state, groups, {"yielded": 3}, {"yielded": 4}, {"p9.0": [[request], []]})


def checkpoints(contents: ModuleType, root: Path, ranks: int = 1, synced: list[str] | None = None) -> Any:
    def save_models(folder: Path, state: Any) -> None:
        (folder / "actor").mkdir()
        for rank in range(min(ranks, 2)):
            (folder / "actor" / f"model_world_size_{ranks}_rank_{rank}.pt").write_bytes(b"w")

    return contents.Checkpoints(
        root=root,
        run="r",
        identity={"verl": "x"},
        keep=2,
        partition="train",
        save_models=save_models,
        sync_ledger=lambda: (synced if synced is not None else []).append(
            ",".join(sorted(p.name for p in root.iterdir()))
        ),
    )


def test_all_contents_can_be_read_back(contents: ModuleType, store: Store, tmp_path: Path) -> None:
    import torch

    written, synced = snapshot(contents, flow_state(store)), list[str]()
    folder = checkpoints(contents, tmp_path, synced=synced).write(written)
    assert synced == [".global_step_2.part"], "the ledger is on disk before the checkpoint is published"
    verify(folder, {"verl": "x"})
    found = contents.read(folder)
    assert found.state.flow.queue.taken.keys() == written.state.flow.queue.taken.keys()
    assert found.state.flow.ledger == written.state.flow.ledger
    assert (found.state.kl_coef, found.state.meters, found.loader) == (0.25, {"x": [1.5]}, {"yielded": 3})
    assert found.transcripts == written.transcripts
    before, store.rows = store.rows, {}
    contents.put(contents.kept_groups(found.state), found.samples, "train")
    keys = {one.key for group in written.groups for one in group.trajectories}
    assert store.rows.keys() == store.tags.keys() == keys
    assert set(map(str, store.tags.values())) == {str({"status": "success", "response_len": 3})}
    for key in keys:
        for name, value in before[key].items():
            got = store.rows[key][name]
            assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value, (key, name)


def test_columns_of_later_stages_are_not_stored(contents: ModuleType, store: Store, tmp_path: Path) -> None:
    flow = flow_state(store)
    store.rows[next(flow.finished()).trajectories[0].key]["old_log_probs"] = np.zeros(3)
    found = contents.read(checkpoints(contents, tmp_path).write(snapshot(contents, flow)))
    assert all("old_log_probs" not in row for row in found.samples.values())


def test_samples_of_groups_that_are_not_kept_are_not_stored(
    contents: ModuleType, store: Store, tmp_path: Path
) -> None:
    flow = flow_state(store)
    rejected = next(flow.finished()).uid
    found = contents.read(
        checkpoints(contents, tmp_path).write(snapshot(contents, flow, lambda group: group.uid == rejected))
    )
    assert rejected not in {group.uid for group in contents.kept_groups(found.state)}
    assert not any(key.startswith(f"{rejected}_") for key in found.samples)


def test_only_the_newest_checkpoints_are_kept(contents: ModuleType, store: Store, tmp_path: Path) -> None:
    import dataclasses

    flow = flow_state(store)
    for step in (2, 4, 6):
        checkpoints(contents, tmp_path).write(snapshot(contents, dataclasses.replace(flow, step=step)))
    assert sorted(path.name for path in tmp_path.glob("global*")) == ["global_step_4", "global_step_6"]


def test_missing_files_of_ranks_are_an_error(contents: ModuleType, store: Store, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="2 of 4 ranks have written .* all of them share"):
        checkpoints(contents, tmp_path, ranks=4).write(snapshot(contents, flow_state(store)))
    assert list(tmp_path.iterdir()) == [], "no file remains"


def test_a_sample_that_cannot_be_written_is_an_error_and_leaves_no_file(
    contents: ModuleType, store: Store, tmp_path: Path
) -> None:
    flow = flow_state(store)
    for row in store.rows.values():
        row["extra_fields"] = {"tool": SimpleNamespace()}
    with pytest.raises(CheckpointError, match="SimpleNamespace cannot be written without pickle"):
        checkpoints(contents, tmp_path).write(snapshot(contents, flow))
    assert list(tmp_path.iterdir()) == []


def test_inconsistent_files_are_rejected(contents: ModuleType, store: Store, tmp_path: Path) -> None:
    folder = checkpoints(contents, tmp_path).write(snapshot(contents, flow_state(store)))
    samples = contents.tensor_tree.read(folder / "samples")
    lost = sorted(samples)[0]
    contents.tensor_tree.write(folder / "samples", {key: row for key, row in samples.items() if key != lost})
    with pytest.raises(CheckpointError, match=f"lacks the samples of 1 responses of its state, e.g. {lost}"):
        contents.read(folder)
    (folder / "pipeline.json").write_text('{"flow": 3}')
    with pytest.raises(CheckpointError, match="is invalid"):
        contents.read(folder)
