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
from recipe.async_pipeline.core.token_spans import spans_of
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
        """Return the columns that exist."""
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        names = [name for name in select_fields if name in self.rows[keys[0]]]
        return list_of_dict_to_tensordict([{name: self.rows[key][name] for name in names} for key in keys])


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
    state = contents.SavedRun(
        flow=flow,
        prompts=prompts,
        kept=tuple(g.uid for g in groups),
        reference=None,
        kl_coef=0.25,
        meters={"x": [1.5]},
    )
    request = contents.RecordedRequest([1], [2], [-0.5], spans_of([[0, 0]]), None, "replica 0")
    return contents.Snapshot(state, groups, {"yielded": 3}, {"yielded": 4}, {"p9.0": [[request], []]})


class Writer:
    """Writes checkpoints in one call."""

    def __init__(self, contents: ModuleType, **settings: Any) -> None:
        self._checkpoints = contents.Checkpoints(**settings)

    def write(self, snapshot: Any) -> Path:
        part = self._checkpoints.begin(snapshot.state.flow.step)
        try:
            self._checkpoints.write_rest(part, snapshot)
            self._checkpoints.write_models(part, snapshot.state)
            folder: Path = self._checkpoints.publish(part, snapshot.state.flow.step)
        except BaseException:
            part.abandon()
            raise
        return folder


def checkpoints(
    contents: ModuleType,
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
        contents,
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


def test_progress_counts_bytes_written_and_hashed(contents: ModuleType, tmp_path: Path) -> None:
    part = contents.Unfinished(tmp_path / "part")
    assert part.progress() == 0, "the folder may be gone, or not exist yet"
    (tmp_path / "part" / "actor").mkdir(parents=True)
    (tmp_path / "part" / "actor" / "x").write_bytes(b"12345")
    assert part.progress() == 5
    part.count(3)
    assert part.progress() == 8
    part.abandon()
    assert not (tmp_path / "part").exists()


def test_missing_files_of_ranks_are_an_error(contents: ModuleType, store: Store, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="2 of 4 ranks have written .* all of them share"):
        checkpoints(contents, tmp_path, ranks=4).write(snapshot(contents, flow_state(store)))
    assert list(tmp_path.iterdir()) == [], "no file remains"


def test_files_of_megatron_ranks_are_counted_too(contents: ModuleType, store: Store, tmp_path: Path) -> None:
    names = "megatron_world_size_{ranks}_rank_{rank}.json"
    checkpoints(contents, tmp_path, ranks=2, file=names).write(snapshot(contents, flow_state(store)))
    with pytest.raises(CheckpointError, match="2 of 3 ranks have written"):
        checkpoints(contents, tmp_path, ranks=3, file=names).write(snapshot(contents, flow_state(store)))


def test_a_sample_that_cannot_be_written_is_an_error_and_leaves_no_file(
    contents: ModuleType, store: Store, tmp_path: Path
) -> None:
    flow = flow_state(store)
    for row in store.rows.values():
        row["extra_fields"] = {"tool": SimpleNamespace()}
    with pytest.raises(CheckpointError, match="SimpleNamespace cannot be written without pickle"):
        checkpoints(contents, tmp_path).write(snapshot(contents, flow))
    assert list(tmp_path.iterdir()) == []


def test_inconsistent_files_are_rejected(
    contents: ModuleType, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints(contents, tmp_path).write(snapshot(contents, flow_state(store)))
    samples = contents.tensor_tree.read(folder / "samples")
    lost = sorted(samples)[0]
    left = {key: row for key, row in samples.items() if key != lost}
    contents.tensor_tree.write(contents.WrittenFiles(folder), folder / "samples", left)
    with pytest.raises(CheckpointError, match="is damaged: samples.* move it away to resume from an earlier"):
        contents.read(folder)
    monkeypatch.setattr(contents.store, "damage", lambda checkpoint: None)
    with pytest.raises(CheckpointError, match=f"lacks the samples of 1 responses of its state, e.g. {lost}"):
        contents.read(folder)
    (folder / "pipeline.json").write_text('{"flow": 3}')
    with pytest.raises(CheckpointError, match="is invalid"):
        contents.read(folder)


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
    contents: ModuleType,
    store: Store,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    rejection: dict[str, str] | None,
    outputs: int,
) -> None:
    """The step has passed verl's reward stage before its samples are saved."""
    import torch
    from omegaconf import OmegaConf

    from recipe.async_pipeline.core.items import Trajectory

    base = load("verl.trainer.ppo.v1.trainer_base")
    monkeypatch.setattr(base, "tq", store)
    algorithm: dict[str, Any] = {"use_kl_in_reward": False, "adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0}
    algorithm["rollout_correction"] = rejection and {"bypass_mode": False, **rejection}
    settings = {"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 2}}}
    trainer = SimpleNamespace(config=OmegaConf.create(settings))

    keys = [f"p0_{session}_{i}" for session in range(2) for i in range(outputs)]
    for number, key in enumerate(keys):
        store.rows[key] = masked_sample("p0", 9 + number, number)
    columns = sorted(store.rows[keys[0]])
    responses = [
        Trajectory(key=key, first_version=0, last_version=0, num_tokens=9, payload={}) for key in keys
    ]
    group = Group(uid="p0", step=3, trajectories=tuple(responses), payload=[columns])

    def reward_stage(seed: int) -> tuple[list[list[int]], list[list[float]], dict[str, Any]]:
        """Return the tokens to train, their advantages and the metrics, for old log-probs of `seed`."""
        torch.manual_seed(seed)
        metrics: dict[str, Any] = {}
        for key in keys:
            sampled = store.rows[key]["rollout_log_probs"]
            store.rows[key]["old_log_probs"] = sampled + 0.5 * torch.randn(len(sampled))
        base.PPOTrainer._compute_advantage(trainer, Meta(keys), metrics)
        rows = [store.rows[key] for key in keys]
        return [r["response_mask"].tolist() for r in rows], [r["advantages"].tolist() for r in rows], metrics

    stored = [store.rows[key]["response_mask"].tolist() for key in keys]
    ahead, *_ = reward_stage(seed=1)
    assert (ahead != stored) is (rejection is not None)
    samples = contents.fetch([group], "train")

    # The run that continues has the log-probs of the saved weights, as the resumed one.
    for row in store.rows.values():
        row["response_mask"] = row["loss_mask"]
    undisturbed = reward_stage(seed=2)

    store.rows = {}
    contents.put([group], samples, "train")
    assert [store.rows[key]["response_mask"].tolist() for key in keys] == stored
    assert all(sorted(row) == columns for row in store.rows.values())
    assert reward_stage(seed=2) == undisturbed
