# SPDX-License-Identifier: Apache-2.0
"""Write and read the contents of a checkpoint.

    actor/, critic/           model, optimizer, scheduler and random state of every rank, as verl writes them
    pipeline.json             state of the pipeline (`core.flow_state`), places of prompts, meters
    samples.{safetensors,msgpack}      columns of finished responses that are not trained
    transcripts.{safetensors,msgpack}  recorded requests of unfinished responses (`partial_rollouts`)
    dataloader.{safetensors,msgpack}   the dataloader's state before the oldest prompt without a response
    reference/                the reference policy, if it was replaced and is older than this step
    data.pt                   the dataloader's current state, for verl's trainers

Columns that later stages add (log-probs, values, advantages) are not stored, because those stages run again.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import transfer_queue as tq
from verl.trainer.ppo.utils import Role
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from ...checkpoint import store, tensor_tree
from ...checkpoint.hashed_file import WrittenFiles
from ...config.paths import OWN
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
"""Samples per call to the sample store."""
MASK, MASK_AS_STORED = "response_mask", "loss_mask"
"""verl stores the mask of a response under both names. Rollout rejection overwrites the first one."""


class SavedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The contents without tensors and the dataloader's state."""

    flow: FlowState
    prompts: PromptSourceState
    kept: tuple[str, ...]
    """Uids of the groups whose samples are stored; other finished groups are not trained."""
    reference: int | None
    """The version in `reference/`, or None if it is not stored."""
    kl_coef: float | None
    """Current coefficient of an adaptive KL penalty in the reward."""
    meters: Mapping[str, Any]


class Restored(NamedTuple):
    """The contents of a checkpoint."""

    folder: Path
    state: SavedRun
    loader: Any
    samples: Mapping[str, Mapping[str, Any]]
    transcripts: dict[str, list[list[RecordedRequest]]]


class Snapshot(NamedTuple):
    """The contents of a checkpoint to write, without models."""

    state: SavedRun
    groups: Sequence[Group]
    """The groups of `state.kept`."""
    loader: Any
    present_loader: Any
    transcripts: Mapping[str, Sequence[Sequence[RecordedRequest]]]


class Checkpoints:
    """Writes the checkpoints of one run. Methods block; call them in threads."""

    def __init__(
        self,
        *,
        root: Path,
        run: str,
        identity: Mapping[str, str],
        keep: int | None,
        partition: str,
        save_models: Callable[[Path, SavedRun], object],
        sync_ledger: Callable[[], object],
    ) -> None:
        """`save_models` makes the workers write to a folder; `sync_ledger` flushes the ledger to disk."""
        self._root, self._run, self._identity, self._keep = root, run, identity, keep
        self._partition, self._save_models, self._sync_ledger = partition, save_models, sync_ledger

    def begin(self, step: int) -> Unfinished:
        """Create the folder of a checkpoint that is being written."""
        return Unfinished(store.begin(self._root, step))

    def write_models(self, part: Unfinished, state: SavedRun) -> None:
        """Have the workers write the models. Raises CheckpointError if files of some ranks are missing."""
        self._save_models(part.folder, state)
        _require_all_ranks(part.folder / ACTOR)

    def write_rest(self, part: Unfinished, snapshot: Snapshot) -> None:
        """Write everything except the models; may run at the same time. Reads the samples from the store.

        Raises CheckpointError if a sample requires pickle.
        """
        files, folder = part.files, part.folder
        with files.create(folder / STATE) as file:
            file.write(encode(snapshot.state))
        tensor_tree.write(files, folder / LOADER, snapshot.loader)
        with files.create(folder / VERLS_LOADER) as file:
            torch.save(snapshot.present_loader, file)
        tensor_tree.write(files, folder / TRANSCRIPTS, as_plain(snapshot.transcripts))
        tensor_tree.write(files, folder / SAMPLES, fetch(snapshot.groups, self._partition))

    def publish(self, part: Unfinished, step: int) -> Path:
        """Hash what the workers wrote, publish the checkpoint, and delete old ones; return its folder.

        Raises OSError if the disk fails.
        """
        # A published checkpoint guarantees that the ledger covers its state.
        self._sync_ledger()
        folder = store.publish(
            part.folder,
            step=step,
            run=self._run,
            identity=self._identity,
            saved_unix=time.time(),
            known=part.files.entries,
            count=part.count,
        )
        store.prune(self._root, self._run, self._keep)
        return folder


class Unfinished:
    """A checkpoint that is being written."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, WrittenFiles(folder)
        self._hashed, self._lock = 0, threading.Lock()

    def count(self, nbytes: int) -> None:
        """Add bytes that were read to be hashed."""
        with self._lock:
            self._hashed += nbytes

    def progress(self) -> int:
        """Return the number of bytes that were written or hashed so far. Blocks."""
        written = 0
        for folder, _, names in os.walk(self.folder):
            for name in names:
                # Workers rename files, and publishing renames the folder.
                with suppress(FileNotFoundError):
                    written += os.stat(os.path.join(folder, name)).st_size
        return self._hashed + written

    def abandon(self) -> None:
        """Delete its files, unless it is published already."""
        shutil.rmtree(self.folder, ignore_errors=True)


def read(folder: Path) -> Restored:
    """Read a checkpoint, without its models.

    Raises CheckpointError if its files are damaged, invalid or inconsistent.
    """
    refuse_damage(folder, [store.damage(folder)])
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=SavedRun)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{folder / STATE} is invalid: {error}") from None

    loader, samples, transcripts = (
        tensor_tree.read(folder / name) for name in (LOADER, SAMPLES, TRANSCRIPTS)
    )
    restored = Restored(folder, state, loader, samples, from_plain(transcripts))

    missing = [key for group in kept_groups(state) for key in _keys(group) if key not in restored.samples]
    if missing:
        raise CheckpointError(
            f"{folder} lacks the samples of {len(missing)} responses of its state, e.g. {missing[0]}"
        )
    return restored


def refuse_damage(checkpoint: Path, found: Iterable[str | None]) -> None:
    """Raise CheckpointError if one of the processes that load a checkpoint has found damage."""
    for damage in found:
        if damage is not None:
            raise CheckpointError(
                f"{checkpoint} is damaged: {damage}; move it away to resume from an earlier one, or set "
                f"{OWN}.faults.verify_checkpoint_at_start=true to pass over damaged ones"
            )


def kept_groups(state: SavedRun) -> list[Group]:
    """Return the finished groups whose samples are stored."""
    kept = set(state.kept)
    return [group for group in state.flow.finished() if group.uid in kept]


def encode(state: SavedRun) -> bytes:
    """Return the state as JSON. Raises CheckpointError if a value cannot be written."""
    return msgspec.json.encode(state, enc_hook=_plain_number)


def _plain_number(value: Any) -> Any:
    """Return the Python number of a numpy number, as verl's tags may contain."""
    if hasattr(value, "item"):
        return value.item()
    raise CheckpointError(f"a {type(value).__name__} in the tag of a sample cannot be written as JSON")


def _keys(group: Group) -> list[str]:
    return [one.key for one in group.trajectories]


def _require_all_ranks(folder: Path) -> None:
    """Raise CheckpointError if files of some ranks are missing, e.g. because hosts write to local disks."""
    # The weights of an FSDP rank, or what `training_worker.EngineWorker` adds for a Megatron rank.
    found = sorted(folder.glob("m*_world_size_*_rank_*"))
    ranks = int(found[0].name.split("_")[3]) if found else 0
    if len(found) != ranks or not ranks:
        raise CheckpointError(
            f"{len(found)} of {ranks or 'all'} ranks have written to {folder.parent.parent}; with several "
            "hosts, set trainer.default_local_dir to a file system that all of them share"
        )


# The sample store.


def fetch(groups: Iterable[Group], partition: str) -> dict[str, dict[str, Any]]:
    """Return a map from key to the columns as the rollout wrote them, for each response of the groups.

    `Group.payload` has the names of the columns, for each response or one entry for all. A later step may
    have passed the reward stage already, which rejects tokens in `response_mask`. A resumed run would reject
    from what is left of it, so the mask is taken from `loss_mask`, which only the rollout writes.
    """
    keys_by_names: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for group in groups:
        columns = list(group.payload) * (len(group.trajectories) if len(group.payload) == 1 else 1)
        for one, names in zip(group.trajectories, columns, strict=True):
            keys_by_names[tuple(names)].append(one.key)

    found: dict[str, dict[str, Any]] = {}
    for names, keys in keys_by_names.items():
        for first in range(0, len(keys), KEYS_A_CALL):
            some = keys[first : first + KEYS_A_CALL]
            source = {
                name: MASK_AS_STORED if name == MASK and MASK_AS_STORED in names else name for name in names
            }
            data = tq.kv_batch_get(
                keys=some, partition_id=partition, select_fields=sorted({*source.values()})
            )
            found.update(zip(some, _rows(data, source), strict=True))
    return found


def put(groups: Iterable[Group], samples: Mapping[str, Mapping[str, Any]], partition: str) -> None:
    """Put samples that `fetch` returned back into the sample store, with the tags of their responses."""
    responses = [one for group in groups for one in group.trajectories]
    for first in range(0, len(responses), KEYS_A_CALL):
        some = responses[first : first + KEYS_A_CALL]
        rows = [dict(samples[one.key]) for one in some]
        for indices in joinable(rows):
            tq.kv_batch_put(
                keys=[some[i].key for i in indices],
                partition_id=partition,
                fields=list_of_dict_to_tensordict([rows[i] for i in indices]),
                tags=[dict(some[i].payload) for i in indices],
            )


def _rows(data: Any, source: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the rows of `data`; `source` maps the name of a column to the one to read it from."""
    columns = {
        name: list(data[read].unbind(0) if isinstance(data[read], torch.Tensor) else data[read])
        for name, read in source.items()
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
