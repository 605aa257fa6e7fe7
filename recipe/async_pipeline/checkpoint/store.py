# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: complete or absent, and used only by the run that they belong to.

    <default_local_dir>/
      .global_step_20.part/      being written
      global_step_15/            published
        manifest.json            step, run, identity; size and xxh3 of every other file
        actor/ critic/           verl's own files
        ...
      latest_checkpointed_iteration.txt    for verl's tools

A checkpoint is written into a `.part` folder that is never read. Once every file, and the manifest last, is
on disk, a rename publishes it. A crash therefore leaves either the whole checkpoint or a `.part` folder,
which the next process removes. A published checkpoint can still be damaged or belong to another run, so it
is verified before use and refused with a reason: the manifest and the size of each file before anything is
started, the contents of a file by the process that loads it (`damage`).

This module handles files and manifests; `verl_bridge.trainer.checkpoint_contents` defines their contents.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from ..config.paths import OWN
from ..errors import CheckpointError, ConfigError
from .hashed_file import CountBytes, FileEntry, entry_of

FORMAT, READABLE = 3, (2, 3)
"""The format that is written, and all formats that can be read."""
MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
"""The name that verl's tools expect."""
HASH_THREADS = 4
_PUBLISHED = re.compile(r"global_step_(\d+)")
_RANK = re.compile(r"rank_(\d+)[._]")
_LEFTOVER = re.compile(r"\.global_step_\d+\.(part|gone)")


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a checkpoint, and the run that it belongs to."""

    format: int
    step: int
    run: str
    """Name of the run, which it keeps when it is resumed."""
    epoch: int = 0
    """Number of the process that wrote it, among all that have written to the folder; see `next_epoch`."""
    record: int = 0
    """Number of the last ledger record that it covers."""
    saved_unix: float
    """For readers: clocks of hosts differ, so it orders nothing."""
    identity: Mapping[str, str]
    """Settings that a run must share to resume from here, by the name of their key."""
    files: tuple[FileEntry, ...]
    checksum: str = ""
    """xxh3 of all other fields."""

    def sealed(self) -> CheckpointManifest:
        """Return a copy with its checksum set."""
        bare = msgspec.structs.replace(self, checksum="")
        return msgspec.structs.replace(self, checksum=xxhash.xxh3_64_hexdigest(msgspec.json.encode(bare)))


class FoundCheckpoint(NamedTuple):
    """A checkpoint that a run can resume from."""

    folder: Path
    manifest: CheckpointManifest


# Writing.


def begin(root: Path, step: int) -> Path:
    """Create an empty folder for writing a checkpoint; return it."""
    part = root / f".global_step_{step}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def publish(
    part: Path,
    *,
    step: int,
    run: str,
    identity: Mapping[str, str],
    saved_unix: float,
    epoch: int,
    record: int,
    known: Mapping[str, FileEntry] | None = None,
    count: CountBytes | None = None,
) -> Path:
    """Publish the files in `part` as a checkpoint; block until they are on disk. Returns its folder.

    Replaces a checkpoint of the same step; that of another run moves to the folder `earlier.RUN`.

    `known`: entries of files that are on disk and were hashed while they were written, by path; the others
    are read, and `count` receives the bytes of each piece.

    Raises OSError if the disk does not accept the data.
    """
    hashed = known or {}

    def entry(path: Path) -> FileEntry:
        name = path.relative_to(part).as_posix()
        return hashed[name] if name in hashed else entry_of(part, path, sync=True, count=count)

    files = sorted(path for path in part.rglob("*") if path.is_file())
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        entries = tuple(threads.map(entry, files))
    manifest = CheckpointManifest(
        format=FORMAT,
        step=step,
        run=run,
        epoch=epoch,
        record=record,
        saved_unix=saved_unix,
        identity=dict(identity),
        files=entries,
    ).sealed()

    # The manifest is last on disk: with it the checkpoint is complete.
    _write(part / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))

    for folder in [part, *(path for path in part.rglob("*") if path.is_dir())]:
        _sync_folder(folder)

    final = part.with_name(f"global_step_{step}")
    _make_room(final, run)
    part.rename(final)
    _sync_folder(final.parent)

    tracker = final.parent / TRACKER
    _write(tracker.with_suffix(".part"), str(step).encode())
    tracker.with_suffix(".part").replace(tracker)
    return final


def _make_room(final: Path, run: str) -> None:
    """Delete the checkpoint of this step, or move it away if it is another run's, which may be all it has."""
    found = _manifest_of(final)
    if found is not None and found.run != run:
        kept = final.parent / f"earlier.{found.run}"
        kept.mkdir(exist_ok=True)
        remove(kept / final.name)
        final.rename(kept / final.name)
    remove(final)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint. The rename first ensures that it never looks like a damaged one."""
    if checkpoint.exists():
        gone = checkpoint.with_name(f".{checkpoint.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        checkpoint.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def prune(root: Path, run: str, keep: int | None) -> list[Path]:
    """Delete the oldest checkpoints of `run`, keep the newest `keep` (None: all); return the deleted ones."""
    if keep is None or keep < 1:
        return []
    own = [
        folder
        for folder in published(root)
        if (found := _manifest_of(folder)) is not None and found.run == run
    ]
    for folder in own[keep:]:
        remove(folder)
    return own[keep:]


def sweep(root: Path) -> None:
    """Delete the leftovers of a process that was killed while it wrote or deleted a checkpoint."""
    for path in root.iterdir() if root.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


# Reading.


def published(root: Path) -> list[Path]:
    """Return all published checkpoints, the most recently written first, by no clock.

    Those whose manifest cannot be read are first: they are to be refused, not to be passed over silently.
    """
    found = (
        [path for path in root.iterdir() if _PUBLISHED.fullmatch(path.name) and path.is_dir()]
        if root.is_dir()
        else []
    )
    return sorted(found, key=_order, reverse=True)


def next_epoch(root: Path) -> int:
    """Return the number of a process that will write to a folder: one above the highest number there."""
    manifests = (_manifest_of(folder) for folder in published(root))
    return 1 + max((manifest.epoch for manifest in manifests if manifest is not None), default=0)


def verify(
    checkpoint: Path, identity: Mapping[str, str], run: str | None = None, *, contents: bool = False
) -> CheckpointManifest:
    """Check the manifest of a checkpoint and the sizes of its files; return the manifest.

    `contents`: also read all files and compare their hashes.

    Raises CheckpointError if it is missing or damaged, its identity differs from `identity`, or it does not
    belong to `run` (None accepts any run).
    """
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} does not exist")
    if not (checkpoint / MANIFEST).is_file():
        raise CheckpointError(
            f"{checkpoint} has no {MANIFEST}: this pipeline did not write it, or did not finish writing it"
        )
    manifest = _manifest_of(checkpoint)
    # An older format has other fields, of which its checksum is.
    if manifest is not None and manifest.format not in READABLE:
        raise CheckpointError(
            f"{checkpoint} has format {manifest.format}; this version of the pipeline reads "
            f"{' and '.join(map(str, READABLE))}"
        )
    if manifest is None or manifest.sealed() != manifest:
        raise CheckpointError(
            f"{checkpoint} is damaged: its {MANIFEST} cannot be read, or differs from what was written"
        )
    if checkpoint.name != f"global_step_{manifest.step}":
        raise CheckpointError(f"{checkpoint} holds step {manifest.step}: it was renamed")

    _check_owner(checkpoint, manifest, identity, run)
    if not manifest.files:
        raise CheckpointError(f"{checkpoint} is damaged: its {MANIFEST} lists no file")
    if (wrong := _first_difference(checkpoint, manifest.files, contents=contents)) is not None:
        raise CheckpointError(f"{checkpoint} is damaged: {wrong}")
    return manifest


def damage(checkpoint: Path, folder: str = "", rank: int = 0) -> str | None:
    """Return how the contents of files differ from what was written, or None if they do not.

    `folder`: the files directly in the checkpoint (empty), or those below one of its folders, for a process
    with this rank: the files that have the rank in their name and, for rank 0, the files without a rank.
    """
    manifest = _manifest_of(checkpoint)
    if manifest is None:
        return f"its {MANIFEST} cannot be read"
    below = [entry for entry in manifest.files if entry.path.rpartition("/")[0].partition("/")[0] == folder]
    return _first_difference(checkpoint, [entry for entry in below if _rank_of(entry.path) == rank])


def require_shard(checkpoint: Path, shard: str) -> Path:
    """Return the path of a shard, without suffix. Raises CheckpointError if its files are damaged."""
    manifest = _manifest_of(checkpoint)
    entries = () if manifest is None else manifest.files
    own = [entry for entry in entries if entry.path.rpartition(".")[0] == shard]
    refuse_damage(checkpoint, [_first_difference(checkpoint, own) if own else f"{shard} is missing"])
    return checkpoint / shard


def refuse_damage(checkpoint: Path, found: Iterable[str | None]) -> None:
    """Raise CheckpointError if one of the processes that load a checkpoint has found damage."""
    for damage in found:
        if damage is not None:
            raise CheckpointError(
                f"{checkpoint} is damaged: {damage}; move it away to resume from an earlier one, or set "
                f"{OWN}.faults.verify_checkpoint_at_start=true to pass over damaged ones"
            )


def _rank_of(path: str) -> int:
    found = _RANK.search(path.rpartition("/")[2])
    return int(found[1]) if found else 0


def _first_difference(checkpoint: Path, entries: Sequence[FileEntry], *, contents: bool = True) -> str | None:
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        wrong = threads.map(lambda entry: _difference(checkpoint, entry, contents=contents), entries)
        return next((one for one in wrong if one is not None), None)


def _check_owner(
    checkpoint: Path, manifest: CheckpointManifest, identity: Mapping[str, str], run: str | None
) -> None:
    for name in sorted({*manifest.identity, *identity}):
        theirs, ours = manifest.identity.get(name, "(not set)"), identity.get(name, "(not set)")
        if theirs != ours:
            raise CheckpointError(
                f"{checkpoint} belongs to another run: {name} was {theirs} there and is {ours} here; set it "
                "back, or start a new run"
            )
    if run not in (None, manifest.run):
        raise CheckpointError(
            f"{checkpoint} belongs to run {manifest.run}; the ledger in the run directory belongs to "
            f"run {run}"
        )


def newest(
    root: Path,
    identity: Mapping[str, str],
    run: str | None,
    say: Callable[[str], object],
    *,
    contents: bool = False,
) -> FoundCheckpoint | None:
    """Return the newest usable checkpoint of `run` (None: of any run), or None if there are no checkpoints.

    `contents`: as for `verify`. `say` receives a line per refused checkpoint.

    Raises ConfigError if there are checkpoints but none is usable.
    """
    refused = []
    for folder in published(root):
        try:
            return FoundCheckpoint(folder, verify(folder, identity, run, contents=contents))
        except CheckpointError as error:
            refused.append(str(error))
            say(f"checkpoint refused: {error}")

    if refused:
        raise ConfigError(
            f"trainer.resume_mode=auto found no usable checkpoint in {root}; the newest is refused: "
            f"{refused[0]}; set trainer.resume_mode=disable for a fresh start, resume_path to choose one of "
            "them, or another trainer.default_local_dir"
        )
    return None


def _manifest_of(checkpoint: Path) -> CheckpointManifest | None:
    """Return the manifest of a checkpoint, or None if it cannot be read."""
    try:
        return msgspec.json.decode((checkpoint / MANIFEST).read_bytes(), type=CheckpointManifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _order(checkpoint: Path) -> tuple[float, int, int]:
    """Return a key that grows with the time at which a checkpoint was written."""
    manifest = _manifest_of(checkpoint)
    if manifest is None:
        return math.inf, 0, int(checkpoint.name.rpartition("_")[2])
    return manifest.epoch, manifest.record, manifest.step


def _difference(checkpoint: Path, entry: FileEntry, *, contents: bool) -> str | None:
    """Return how a file differs from its entry in the manifest, or None if it does not.

    Without `contents`, only its size is compared, and the file is not read.
    """
    path = checkpoint / entry.path
    try:
        if "\0" in entry.path or not path.resolve().is_relative_to(checkpoint.resolve()):
            return f"{entry.path!r} is not a file below it"
        if path.stat().st_size != entry.nbytes:
            return f"{entry.path} has {path.stat().st_size} bytes instead of {entry.nbytes}"
        if not contents:
            return None
        found = entry_of(checkpoint, path)
    except OSError as error:
        return f"{entry.path} cannot be read: {error.strerror}"
    return None if found == entry else f"the contents of {entry.path} differ from what was written"


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
