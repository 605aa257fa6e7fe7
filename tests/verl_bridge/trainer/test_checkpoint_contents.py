# SPDX-License-Identifier: Apache-2.0
"""The contents of a checkpoint can be read back; incomplete and damaged ones are rejected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from recipe.async_pipeline.checkpoint.store import verify
from recipe.async_pipeline.core.flow_state import FlowState
from recipe.async_pipeline.core.groups.items import Group
from recipe.async_pipeline.errors import CheckpointError
from tests.fakes.lives import Life
from tests.fakes.trainer import SimTrainer

pytestmark = pytest.mark.real_engine


def flow_state() -> FlowState:
    """Return the state of a run that is far ahead."""
    trainer = SimTrainer(max_lag=4, steps=6, groups=2, save_every=2, costs={"assemble": 3.0})
    return Life(trainer).checkpoints[0].flow


def with_columns(group: Group) -> Group:
    import dataclasses

    responses = tuple(
        dataclasses.replace(one, payload={"status": "success", "response_len": np.int64(3)})
        for one in group.trajectories
    )
    alike = sum(group.uid.encode()) % 2
    return dataclasses.replace(
        group, trajectories=responses, payload=[["responses"]] * (1 if alike else len(responses))
    )


def snapshot(
    module: ModuleType, flow: FlowState, reject: Callable[[Group], bool] = lambda group: False
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
    prompts = module.PromptSourceState(before=0, drawn=3, places={}, undealt=[], in_flight=flow.in_flight())
    state = module.SavedRun(
        flow=flow,
        prompts=prompts,
        kept=tuple(g.uid for g in groups),
        reference=None,
        kl_coef=0.25,
        meters={"x": [1.5]},
    )
    return module.Snapshot(state, groups, {"yielded": 3}, {"yielded": 4})


class Writer:
    """Writes checkpoints in one call."""

    def __init__(self, module: ModuleType, **settings: Any) -> None:
        self._checkpoints = module.Checkpoints(**settings)

    def write(self, snapshot: Any) -> Path:
        part = self._checkpoints.begin(snapshot.state.flow.step)
        try:
            self._checkpoints.write_rest(part, snapshot)
            self._checkpoints.write_models(part, snapshot.state)
            folder: Path = self._checkpoints.publish(part, snapshot.state.flow)
        except BaseException:
            part.abandon()
            raise
        return folder


def checkpoints(
    module: ModuleType,
    root: Path,
    ranks: int = 1,
    synced: list[str] | None = None,
    file: str = "model_world_size_{ranks}_rank_{rank}.pt",
) -> Any:
    def save_models(folder: Path, state: Any) -> None:
        (folder / "actor").mkdir()
        for rank in range(min(ranks, 2)):
            (folder / "actor" / file.format(ranks=ranks, rank=rank)).write_bytes(b"w")

    return Writer(
        module,
        root=root,
        run="r",
        identity={"verl": "x"},
        epoch=1,
        keep=2,
        save_models=save_models,
        sync_ledger=lambda: (synced if synced is not None else []).append(
            ",".join(sorted(p.name for p in root.iterdir()))
        ),
    )


def test_all_contents_can_be_read_back(module: ModuleType, tmp_path: Path) -> None:
    written, synced = snapshot(module, flow_state()), list[str]()
    shards = {"samples": ["samples/rank_0", "samples/rank_1"], "transcripts": []}
    written = written._replace(state=msgspec.structs.replace(written.state, shards=shards))
    folder = checkpoints(module, tmp_path, synced=synced).write(written)
    assert synced == [".global_step_2.part"], "the ledger is on disk before the checkpoint is published"
    verify(folder, {"verl": "x"})
    found = module.read(folder)
    assert found.state.flow.queue.taken.keys() == written.state.flow.queue.taken.keys()
    assert found.state.flow.ledger == written.state.flow.ledger
    assert (found.state.kl_coef, found.state.meters, found.loader) == (0.25, {"x": [1.5]}, {"yielded": 3})
    assert found.state.shards_of("samples") == shards["samples"]
    assert found.state.shards_of("transcripts") == []


def test_a_checkpoint_of_format_2_has_one_shard_of_each(module: ModuleType, tmp_path: Path) -> None:
    found = module.read(checkpoints(module, tmp_path).write(snapshot(module, flow_state())))
    assert [found.state.shards_of(what) for what in ("samples", "transcripts")] == [
        ("samples",),
        ("transcripts",),
    ]


def test_groups_that_are_not_kept_are_named(module: ModuleType, tmp_path: Path) -> None:
    flow = flow_state()
    rejected = next(flow.finished()).uid
    found = module.read(
        checkpoints(module, tmp_path).write(snapshot(module, flow, lambda group: group.uid == rejected))
    )
    assert rejected not in {group.uid for group in module.kept_groups(found.state)}


def test_files_of_other_processes_are_where_they_wrote_them(module: ModuleType, tmp_path: Path) -> None:
    part = module.Unfinished(tmp_path / "part")
    part.folder.mkdir()
    entries = module.tensor_tree.write_shard(str(part.folder), "samples/rank_0", {"a": 1})
    part.add(entries)
    assert {*part.files.entries} == {"samples/rank_0.safetensors", "samples/rank_0.msgpack"}
    (part.folder / "samples/rank_0.msgpack").unlink()
    with pytest.raises(CheckpointError, match="rank_0.msgpack was written to another .* all of them share"):
        part.add(entries)


def test_only_the_newest_checkpoints_are_kept(module: ModuleType, tmp_path: Path) -> None:
    import dataclasses

    flow = flow_state()
    for step in (2, 4, 6):
        checkpoints(module, tmp_path).write(snapshot(module, dataclasses.replace(flow, step=step)))
    assert sorted(path.name for path in tmp_path.glob("global*")) == ["global_step_4", "global_step_6"]


def test_progress_counts_bytes_written_and_hashed(module: ModuleType, tmp_path: Path) -> None:
    part = module.Unfinished(tmp_path / "part")
    assert part.progress() == 0, "the folder may be gone, or not exist yet"
    (tmp_path / "part" / "actor").mkdir(parents=True)
    (tmp_path / "part" / "actor" / "x").write_bytes(b"12345")
    assert part.progress() == 5
    part.count(3)
    assert part.progress() == 8
    part.abandon()
    assert not (tmp_path / "part").exists()


def test_missing_files_of_ranks_are_an_error(module: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="2 of 4 ranks have written .* all of them share"):
        checkpoints(module, tmp_path, ranks=4).write(snapshot(module, flow_state()))
    assert list(tmp_path.iterdir()) == [], "no file remains"


def test_files_of_megatron_ranks_are_counted_too(module: ModuleType, tmp_path: Path) -> None:
    names = "megatron_world_size_{ranks}_rank_{rank}.json"
    checkpoints(module, tmp_path, ranks=2, file=names).write(snapshot(module, flow_state()))
    with pytest.raises(CheckpointError, match="2 of 3 ranks have written"):
        checkpoints(module, tmp_path, ranks=3, file=names).write(snapshot(module, flow_state()))


def test_damaged_files_are_rejected(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints(module, tmp_path).write(snapshot(module, flow_state()))
    (folder / "pipeline.json").write_text('{"flow": 3}')
    with pytest.raises(CheckpointError, match="is damaged: pipeline.* move it away to resume"):
        module.read(folder)
    monkeypatch.setattr(module.store, "damage", lambda checkpoint: None)
    with pytest.raises(CheckpointError, match="is invalid"):
        module.read(folder)
