# SPDX-License-Identifier: Apache-2.0
"""Write and read the contents of a checkpoint.

    actor/, critic/           model, optimizer, scheduler and random state of every rank, as verl writes them
    pipeline.json             state of the pipeline (`core.flow_state`), places of prompts, meters
    samples/rank_N.{safetensors,msgpack}      columns of finished responses that are not trained, written by
                              the storage unit that has them (`sample_store`)
    transcripts/rank_N.{safetensors,msgpack}  recorded requests of unfinished responses, written by the agent
                              loop worker that plays them (`partial_rollouts`)
    dataloader.{safetensors,msgpack}   the dataloader's state before the oldest prompt without a response
    reference/                the reference policy, if it was replaced and is older than this step
    data.pt                   the dataloader's current state, for verl's trainers

Samples and transcripts never pass through the trainer: `pipeline.json` names their shards, `manifest.json`
has the hash that each writer computed. Format 2 has one shard of each, next to `pipeline.json`.

Columns that later stages add (log-probs, values, advantages) are not stored, because those stages run again.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from verl.trainer.ppo.utils import Role

from ...checkpoint import store, tensor_tree
from ...checkpoint.hashed_file import FileEntry, WrittenFiles
from ...core.flow_state import FlowState
from ...core.groups.items import Group
from ...errors import CheckpointError
from .batches.prompt_source import PromptSourceState

STATE, SAMPLES, TRANSCRIPTS, LOADER, REFERENCE = (
    "pipeline.json",
    "samples",
    "transcripts",
    "dataloader",
    "reference",
)
VERLS_LOADER = "data.pt"
ACTOR, CRITIC = "actor", str(Role.Critic)


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
    shards: Mapping[str, Sequence[str]] = {}
    """Names of the shards, by what they hold; empty in format 2."""

    def shards_of(self, what: str) -> Sequence[str]:
        """Return the names of the shards of `SAMPLES` or `TRANSCRIPTS`."""
        return self.shards.get(what, (what,))


class Restored(NamedTuple):
    """The contents of a checkpoint, without models and shards."""

    folder: Path
    state: SavedRun
    loader: Any


class Snapshot(NamedTuple):
    """The contents of a checkpoint to write, without models and shards."""

    state: SavedRun
    groups: Sequence[Group]
    """The groups of `state.kept`."""
    loader: Any
    present_loader: Any


class Checkpoints:
    """Writes the checkpoints of one run. Methods block; call them in threads."""

    def __init__(
        self,
        *,
        root: Path,
        run: str,
        identity: Mapping[str, str],
        epoch: int,
        keep: int | None,
        save_models: Callable[[Path, SavedRun], object],
        sync_ledger: Callable[[], object],
    ) -> None:
        """`epoch`: see `store.next_epoch`. `save_models` makes the workers write to a folder; `sync_ledger`
        flushes the ledger to disk.
        """
        self._root, self._run, self._identity, self._keep = root, run, identity, keep
        self._epoch = epoch
        self._save_models, self._sync_ledger = save_models, sync_ledger

    def begin(self, step: int) -> Unfinished:
        """Create the folder of a checkpoint that is being written."""
        return Unfinished(store.begin(self._root, step))

    def write_models(self, part: Unfinished, state: SavedRun) -> None:
        """Have the workers write the models. Raises CheckpointError if files of some ranks are missing."""
        self._save_models(part.folder, state)
        _require_all_ranks(part.folder / ACTOR)

    def write_rest(self, part: Unfinished, snapshot: Snapshot) -> None:
        """Write everything except models and shards. Raises CheckpointError if a value requires pickle."""
        files, folder = part.files, part.folder
        with files.create(folder / STATE) as file:
            file.write(encode(snapshot.state))
        tensor_tree.write(files, folder / LOADER, snapshot.loader)
        with files.create(folder / VERLS_LOADER) as file:
            torch.save(snapshot.present_loader, file)

    def publish(self, part: Unfinished, state: FlowState) -> Path:
        """Hash what the workers wrote, publish the checkpoint, and delete old ones; return its folder.

        `state`: of the run, as it was written. Raises OSError if the disk fails.
        """
        # A published checkpoint guarantees that the ledger covers its state.
        self._sync_ledger()
        folder = store.publish(
            part.folder,
            step=state.step,
            run=self._run,
            identity=self._identity,
            saved_unix=time.time(),
            epoch=self._epoch,
            record=state.ledger.number,
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

    def add(self, entries: Iterable[FileEntry]) -> None:
        """Add files of other processes. Blocks. Raises CheckpointError if they are not here."""
        entries = list(entries)
        missing = [entry.path for entry in entries if not (self.folder / entry.path).is_file()]
        if missing:
            raise CheckpointError(
                f"{missing[0]} was written to another {self.folder.parent}; with several hosts, set "
                "trainer.default_local_dir to a file system that all of them share"
            )
        self.files.add(entries)

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
    """Read a checkpoint, without its models and shards.

    Raises CheckpointError if its files are damaged, invalid or inconsistent.
    """
    store.refuse_damage(folder, [store.damage(folder)])
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=SavedRun)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{folder / STATE} is invalid: {error}") from None

    return Restored(folder, state, tensor_tree.read(folder / LOADER))


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
