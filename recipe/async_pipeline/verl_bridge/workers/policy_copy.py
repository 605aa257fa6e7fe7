# SPDX-License-Identifier: Apache-2.0
"""A copy of the policy that only computes log-probs: one more consumer of published versions.

It pulls a version when it needs one, from the memory services that the rollout replicas load from; the
trainer is not involved. A version that is needed for longer than the memory holds it is kept on disk, from
which restarted workers and checkpoints get it.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import ProofError, WeightSyncError
from ...weight_sync.memory.manifest import WeightTicket
from ..weights.host_memory_service import HostMemories


class PolicyCopy:
    """A worker group of `PipelineWorker`s with a forward-only model, and the version that it holds."""

    def __init__(self, role: str, group: Any, folder: Path | None = None) -> None:
        """`folder` is where `keep` saves versions."""
        self.group = group
        self.version: int | None = None
        """None: the initial weights of the run."""
        self.role = role
        self._folder = folder
        self.kept: int | None = None
        """The version on disk, or None."""
        self.not_kept: int | None = None
        """The version for which the disk was full, or None if the last one was kept."""
        self.reason = ""
        """What the disk said."""

    def restarted(self, group: Any) -> None:
        """Replace the workers by new ones, which have the initial weights."""
        self.version = None
        self.group = group

    def load(self, ticket: WeightTicket, memories: HostMemories, timeout_s: float) -> None:
        """Load and verify a version on all ranks. Blocks.

        Raises WeightSyncError or ProofError; it is then unknown which weights the ranks hold.
        """
        self.version = None
        loaded = self.group.load_version(ticket, memories, timeout_s)
        found = {one.version for one in loaded}
        if found != {ticket.version}:
            raise WeightSyncError(
                f"{self.role} should have loaded version {ticket.version}, but its ranks hold {sorted(found)}"
            )
        # One rank need not hold a sampled element, but each element is held by some rank.
        if not sum(one.compared for one in loaded):
            raise ProofError(f"v{ticket.version}: nothing could be compared on any rank of {self.role}")
        self.version = ticket.version

    def keep(self) -> None:
        """Save the version that the ranks hold, in place of the one that was kept before. Blocks.

        The latter is deleted first, because the new version is still in memory until it is saved.

        Raises OSError if not all ranks write to the folder, and their error if they cannot save.
        """
        assert self.version is not None
        self.forget()
        folder = self._kept_in(self.version)
        try:
            self.group.save_reference(str(folder))
            found, ranks = len(list(folder.glob("*"))), len(self.group.workers)
            if found != ranks:
                raise OSError(f"{found} of {ranks} ranks of {self.role} have written to {folder}")
        except Exception:
            self.forget()
            raise
        self.kept, self.not_kept = self.version, None

    def load_kept(self) -> None:
        """Load the version that is kept on disk. Blocks."""
        assert self.kept is not None
        self.version = None
        self.group.load_reference(str(self._kept_in(self.kept)))
        self.version = self.kept

    def save(self, version: int, folder: Path) -> None:
        """Save a version to a folder of a checkpoint, without the workers if it is kept on disk. Blocks.

        Raises WeightSyncError if the ranks do not hold it, e.g. because they are being restarted.
        """
        if version == self.kept:
            folder.mkdir(parents=True, exist_ok=True)
            for file in self._kept_in(version).iterdir():
                _link(file, folder / file.name)
            return
        if version != self.version:
            raise WeightSyncError(
                f"{self.role} holds version {self.version}, but the checkpoint needs version {version}; "
                "resume from an earlier one"
            )
        self.group.save_reference(str(folder))

    def forget(self) -> None:
        """Delete what is kept on disk. Blocks."""
        self.kept = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _kept_in(self, version: int) -> Path:
        assert self._folder is not None
        return self._folder / f"version_{version}"


def _link(file: Path, target: Path) -> None:
    """Make `target` the same file, or a copy if it is on another file system."""
    with suppress(OSError):
        os.link(file, target)
        return
    shutil.copyfile(file, target)
