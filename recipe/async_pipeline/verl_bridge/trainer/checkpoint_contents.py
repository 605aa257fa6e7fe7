# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of this pipeline holds, and how it gets there and back.

    actor/, critic/           model, optimizer, scheduler and random state of every rank: verl's own files
    pipeline.json             what the pipeline remembers (`core.state`), where prompts come from, meters
    samples.{safetensors,msgpack}     every column of the answers that are finished and not trained
    transcripts.{safetensors,msgpack}  of the answers that are being written, what there is (`transcripts`)
    dataloader.{safetensors,msgpack}  the dataloader's state from before the oldest prompt that is not
    answered
    reference/                the reference policy, if it was replaced and is older than this step
    data.pt                   the dataloader's present state, for verl's own trainers

Columns that stages of the pipeline add (log-probs, values, advantages) are left out: those stages run again.
"""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import transfer_queue as tq
from verl.trainer.ppo.utils import Role
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from ...checkpoint import store, tensor_tree
from ...core.flow_state import FlowState
from ...core.items import Group
from ...errors import CheckpointError
from ..agent_loop.partial_rollouts import RecordedRequest, as_plain, from_plain
from ..sample_grouping import joinable
from .prompt_source import PromptSourceState

STATE, SAMPLES, TRANSCRIPTS, LOADER, REFERENCE = (
    "pipeline.json",
    "samples",
    "transcripts",
    "dataloader",
    "reference",
)
VERLS_LOADER = "data.pt"
ACTOR, CRITIC = "actor", str(Role.Critic)
KEYS_A_CALL = 256
"""Samples that are fetched from the sample store, or put there, at once."""


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but tensors and the dataloader."""

    flow: FlowState
    prompts: PromptSourceState
    kept: tuple[str, ...]
    """Groups whose samples are there; other finished ones are not trained."""
    reference: int | None
    """The version that is in `reference/`."""
    kl_coef: float | None
    """Of a penalty in the reward that adapts."""
    meters: Mapping[str, Any]


class Restored(NamedTuple):
    """A checkpoint that was read."""

    folder: Path
    state: RunState
    loader: Any
    samples: Mapping[str, Mapping[str, Any]]
    transcripts: dict[str, list[list[RecordedRequest]]]


class Snapshot(NamedTuple):
    """A checkpoint that is to be written."""

    state: RunState
    groups: Sequence[Group]
    """Those of `state.kept`."""
    loader: Any
    present_loader: Any
    transcripts: Mapping[str, Sequence[Sequence[RecordedRequest]]]


class Checkpoints:
    """Writes those of one run. Blocks; for use in threads."""

    def __init__(
        self,
        *,
        root: Path,
        run: str,
        identity: Mapping[str, str],
        keep: int | None,
        partition: str,
        save_models: Callable[[Path, RunState], object],
        sync_ledger: Callable[[], object],
    ) -> None:
        """`save_models` has the workers write into a folder; `sync_ledger` returns once the disk has the
        ledger so far.
        """
        self._root, self._run, self._identity, self._keep = root, run, identity, keep
        self._partition, self._save_models, self._sync_ledger = partition, save_models, sync_ledger

    def write(self, snapshot: Snapshot) -> Path:
        """Returns the folder. Raises OSError and what torch makes of it: the disk does not take it; nothing
        is left of it.

        CheckpointError: something in a sample can only be pickled, or the files of some ranks are not here.
        """
        step = snapshot.state.flow.step
        part = store.begin(self._root, step)
        try:
            self._save_models(part, snapshot.state)
            _require_all_ranks(part / ACTOR)
            (part / STATE).write_bytes(encode(snapshot.state))
            tensor_tree.write(part / LOADER, snapshot.loader)
            torch.save(snapshot.present_loader, part / VERLS_LOADER)
            tensor_tree.write(part / TRANSCRIPTS, as_plain(snapshot.transcripts))
            tensor_tree.write(part / SAMPLES, fetch(snapshot.groups, self._partition))
            # The manifest promises that the ledger reaches to where the state says.
            self._sync_ledger()
            folder = store.publish(
                part, step=step, run=self._run, identity=self._identity, saved_unix=time.time()
            )
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        store.prune(self._root, self._run, self._keep)
        return folder


def read(folder: Path) -> Restored:
    """Raises CheckpointError: what is in its files does not belong together."""
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=RunState)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{folder / STATE} cannot be understood: {error}") from None
    loader, samples, told = (tensor_tree.read(folder / name) for name in (LOADER, SAMPLES, TRANSCRIPTS))
    restored = Restored(folder, state, loader, samples, from_plain(told))
    lost = [key for group in kept_groups(state) for key in _keys(group) if key not in restored.samples]
    if lost:
        raise CheckpointError(f"{folder} has no samples of {len(lost)} answers that it names, e.g. {lost[0]}")
    return restored


def kept_groups(state: RunState) -> list[Group]:
    """The finished groups whose samples are there."""
    kept = set(state.kept)
    return [group for group in state.flow.finished() if group.uid in kept]


def encode(state: RunState) -> bytes:
    return msgspec.json.encode(state, enc_hook=_plain_number)


def _plain_number(value: Any) -> Any:
    """numpy's numbers, which verl's tags may hold."""
    if hasattr(value, "item"):
        return value.item()
    raise CheckpointError(f"a {type(value).__name__} in the tag of a sample cannot be written as JSON")


def _keys(group: Group) -> list[str]:
    return [one.key for one in group.trajectories]


def _require_all_ranks(folder: Path) -> None:
    """Raises CheckpointError: other hosts wrote to disks of their own."""
    found = sorted(folder.glob("model_world_size_*_rank_*.pt"))
    ranks = int(found[0].name.split("_")[3]) if found else 0
    if len(found) != ranks or not ranks:
        raise CheckpointError(
            f"{len(found)} of {ranks or 'all'} ranks have written to {folder.parent.parent}; with several "
            "hosts, "
            "trainer.default_local_dir must be on a file system that all of them share"
        )


# The sample store.


def fetch(groups: Iterable[Group], partition: str) -> dict[str, dict[str, Any]]:
    """Of each answer the columns that the rollout wrote, by its key. `Group.payload` names them, of each
    answer or of all.
    """
    alike: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for group in groups:
        columns = list(group.payload) * (len(group.trajectories) if len(group.payload) == 1 else 1)
        for one, names in zip(group.trajectories, columns, strict=True):
            alike[tuple(names)].append(one.key)
    found: dict[str, dict[str, Any]] = {}
    for names, keys in alike.items():
        for first in range(0, len(keys), KEYS_A_CALL):
            some = keys[first : first + KEYS_A_CALL]
            data = tq.kv_batch_get(keys=some, partition_id=partition, select_fields=list(names))
            found.update(zip(some, _rows(data, names), strict=True))
    return found


def put(groups: Iterable[Group], samples: Mapping[str, Mapping[str, Any]], partition: str) -> None:
    """The way back."""
    answers = [one for group in groups for one in group.trajectories]
    for first in range(0, len(answers), KEYS_A_CALL):
        some = answers[first : first + KEYS_A_CALL]
        rows = [dict(samples[one.key]) for one in some]
        for indices in joinable(rows):
            tq.kv_batch_put(
                keys=[some[i].key for i in indices],
                partition_id=partition,
                fields=list_of_dict_to_tensordict([rows[i] for i in indices]),
                tags=[dict(some[i].payload) for i in indices],
            )


def _rows(data: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    columns = {
        name: list(data[name].unbind(0) if isinstance(data[name], torch.Tensor) else data[name])
        for name in names
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
