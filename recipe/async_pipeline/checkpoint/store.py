# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: whole or not there, and never somebody else's.

    <default_local_dir>/
      .global_step_20.part/      being written
      global_step_15/            published
        manifest.json            step, run, what the run is like; size and xxh3 of every other file
        actor/ critic/           verl's own files
        ...
      latest_checkpointed_iteration.txt    for verl's tools

A checkpoint is written into a folder that nobody reads. When every file in it, and last its manifest, has
reached the
disk, a rename publishes it. So a crash leaves either all of it or a `.part`, which the next process removes.
What is
published can still be damaged or strange; it is therefore checked before it is used, and refused with the
reason.

This module knows files and manifests only; what is in a checkpoint, see `verl_bridge.checkpoints`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from ..errors import CheckpointError, ConfigError

FORMAT = 1
MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
"""verl's name for it."""
HASH_THREADS = 4
PIECE_BYTES = 16 << 20
"""Read at a time while a file is hashed."""
_PUBLISHED = re.compile(r"global_step_(\d+)")
_LEFTOVER = re.compile(r"\.global_step_\d+\.(part|gone)")


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    path: str
    """Relative to the checkpoint, with slashes."""
    nbytes: int
    xxh3: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint consists of, and whose it is."""

    format: int
    step: int
    run: str
    """Which run it is of; a run keeps its name when it is resumed."""
    saved_unix: float
    identity: Mapping[str, str]
    """What a run has to have in common with the one that goes on from here, by the name of the key."""
    files: tuple[FileEntry, ...]
    checksum: str = ""
    """Of all the above."""

    def sealed(self) -> Manifest:
        bare = msgspec.structs.replace(self, checksum="")
        return msgspec.structs.replace(self, checksum=xxhash.xxh3_64_hexdigest(msgspec.json.encode(bare)))


class Found(NamedTuple):
    """A checkpoint that can be resumed from."""

    folder: Path
    manifest: Manifest


# Writing.


def begin(root: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into."""
    part = root / f".global_step_{step}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def publish(part: Path, *, step: int, run: str, identity: Mapping[str, str], saved_unix: float) -> Path:
    """Make what was written a checkpoint; blocks until the disk has it. Returns its folder.

    One of the same step that is there, refused or of another run, is replaced. Raises OSError: the disk does
    not take it.
    """
    files = sorted(path for path in part.rglob("*") if path.is_file())
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        entries = tuple(threads.map(lambda path: _entry(part, path, sync=True), files))
    manifest = Manifest(
        format=FORMAT, step=step, run=run, saved_unix=saved_unix, identity=dict(identity), files=entries
    ).sealed()
    _write(part / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    for folder in [part, *(path for path in part.rglob("*") if path.is_dir())]:
        _sync_folder(folder)
    final = part.with_name(f"global_step_{step}")
    remove(final)
    part.rename(final)
    _sync_folder(final.parent)
    tracker = final.parent / TRACKER
    _write(tracker.with_suffix(".part"), str(step).encode())
    tracker.with_suffix(".part").replace(tracker)
    return final


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, which at no moment looks like one that is damaged."""
    if checkpoint.exists():
        gone = checkpoint.with_name(f".{checkpoint.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        checkpoint.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def prune(root: Path, run: str, keep: int | None) -> list[Path]:
    """Delete a run's oldest checkpoints until `keep` are left; None keeps all. Returns those deleted."""
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
    """Delete what a process left behind that was killed as it wrote or deleted a checkpoint."""
    for path in root.iterdir() if root.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


# Reading.


def published(root: Path) -> list[Path]:
    """All checkpoints, the one that was written last first."""
    found = (
        [path for path in root.iterdir() if _PUBLISHED.fullmatch(path.name) and path.is_dir()]
        if root.is_dir()
        else []
    )
    return sorted(found, key=_written, reverse=True)


def verify(checkpoint: Path, identity: Mapping[str, str], run: str | None = None) -> Manifest:
    """Read all of a checkpoint. Raises CheckpointError: it is torn, or of a run that is not like this one,
    or not `run`.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} is not there")
    if not (checkpoint / MANIFEST).is_file():
        raise CheckpointError(
            f"{checkpoint} has no {MANIFEST}: it was not written by this pipeline, or not to its end"
        )
    manifest = _manifest_of(checkpoint)
    if manifest is None or manifest.sealed() != manifest:
        raise CheckpointError(
            f"{checkpoint} is damaged: its {MANIFEST} cannot be read, or is not what was written"
        )
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"{checkpoint} has format {manifest.format}; this version of the pipeline reads {FORMAT}"
        )
    if checkpoint.name != f"global_step_{manifest.step}":
        raise CheckpointError(f"{checkpoint} says that it is of step {manifest.step}; it was renamed")
    _check_whose(checkpoint, manifest, identity, run)
    if not manifest.files:
        raise CheckpointError(f"{checkpoint} is damaged: its {MANIFEST} names no file")
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        for wrong in threads.map(lambda entry: _difference(checkpoint, entry), manifest.files):
            if wrong is not None:
                raise CheckpointError(f"{checkpoint} is damaged: {wrong}")
    return manifest


def _check_whose(checkpoint: Path, manifest: Manifest, identity: Mapping[str, str], run: str | None) -> None:
    for name in sorted({*manifest.identity, *identity}):
        theirs, ours = manifest.identity.get(name, "(not set)"), identity.get(name, "(not set)")
        if theirs != ours:
            raise CheckpointError(
                f"{checkpoint} is of another run: {name} was {theirs} there and is {ours} here"
            )
    if run not in (None, manifest.run):
        raise CheckpointError(
            f"{checkpoint} is of run {manifest.run}; the ledger in the run directory is of run {run}"
        )


def newest(
    root: Path, identity: Mapping[str, str], run: str | None, say: Callable[[str], object]
) -> Found | None:
    """The last checkpoint that can be used, of a certain run or of any (None); `say` hears one line of each
    that cannot.

    None: there is none at all.

    Raises ConfigError: there are some, and none can be used.
    """
    refused = []
    for folder in published(root):
        try:
            return Found(folder, verify(folder, identity, run))
        except CheckpointError as error:
            refused.append(str(error))
            say(f"checkpoint refused: {error}")
    if refused:
        raise ConfigError(
            f"trainer.resume_mode=auto found no checkpoint in {root} that it can use; the newest is refused: "
            f"{refused[0]}; set trainer.resume_mode=disable to begin anew, resume_path to go on from one "
            "of them, or another trainer.default_local_dir"
        )
    return None


def _manifest_of(checkpoint: Path) -> Manifest | None:
    """None: it cannot be read."""
    try:
        return msgspec.json.decode((checkpoint / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _written(checkpoint: Path) -> float:
    manifest = _manifest_of(checkpoint)
    return checkpoint.stat().st_mtime if manifest is None else manifest.saved_unix


def _difference(checkpoint: Path, entry: FileEntry) -> str | None:
    """What is wrong with a file."""
    path = checkpoint / entry.path
    try:
        if "\0" in entry.path or not path.resolve().is_relative_to(checkpoint.resolve()):
            return f"{entry.path!r} is no file of it"
        if path.stat().st_size != entry.nbytes:
            return f"{entry.path} has {path.stat().st_size} bytes instead of {entry.nbytes}"
        found = _entry(checkpoint, path)
    except OSError as error:
        return f"{entry.path} cannot be read: {error.strerror}"
    return None if found == entry else f"the contents of {entry.path} are not what was written"


def _entry(root: Path, path: Path, *, sync: bool = False) -> FileEntry:
    digest, nbytes = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        for piece in _pieces(file.fileno()):
            digest.update(piece)
            nbytes += len(piece)
        if sync:
            # Whoever wrote it: what is flushed is the file, not a handle.
            os.fsync(file.fileno())
    return FileEntry(path=path.relative_to(root).as_posix(), nbytes=nbytes, xxh3=digest.hexdigest())


def _pieces(descriptor: int) -> Iterator[bytes]:
    while piece := os.read(descriptor, PIECE_BYTES):
        yield piece


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
