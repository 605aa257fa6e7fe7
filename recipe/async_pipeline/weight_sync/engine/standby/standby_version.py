# SPDX-License-Identifier: Apache-2.0
"""A version that a thread stages on the engine's device while the engine generates."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ....errors import WeightSyncError
from ...memory.manifest import Manifest

STAGING_S = 600.0
"""Deadline for the staging of a version, which takes seconds during generation."""

StagingEnded = Callable[[BaseException | None], None]
"""Gets the error of a staging, or None."""


def ignore(error: BaseException | None) -> None:
    """Do nothing: `StandbyVersion.version` returns the version or raises the error as well."""


class StandbyVersion(ABC):
    """The newest version that is to be served next; subclasses know what is staged of it."""

    def __init__(self) -> None:
        self._wanted: int | None = None
        """The version that `begin` was last called with, until it is served."""
        self._ended: dict[int, BaseException | None] = {}
        """The error of that version's staging, or None, once it has ended."""
        self._thread: threading.Thread | None = None

    @abstractmethod
    def stage(self, manifest: Manifest, published: Mapping[str, torch.Tensor]) -> None:
        """Stage a version, in a thread."""

    @abstractmethod
    def discard(self) -> None:
        """Free the memory of what is staged."""

    def begin(
        self,
        manifest: Manifest,
        published: Mapping[str, torch.Tensor],
        ended: StagingEnded = ignore,
        first: Callable[[], None] = lambda: None,
    ) -> None:
        """Stage a version in a thread, which calls `first` and, last, `ended`.

        The thread first waits for that of an older version, whose result is void. If the arena is written
        before `version` returns this version, the result must not be served.
        """
        self._wanted = manifest.version
        self._thread = threading.Thread(
            target=self._run,
            args=(self._thread, manifest, published, ended, first),
            name=f"standby of v{manifest.version}",
            daemon=True,
        )
        self._thread.start()

    def version(self) -> int | None:
        """Return the complete version that is not served yet, or None. Raises the error of the staging."""
        wanted = self._wanted
        if wanted is None or wanted not in self._ended:
            return None
        error = self._ended[wanted]
        if error is not None:
            raise error
        return wanted

    def join(self) -> None:
        """Wait for the staging. Raises WeightSyncError if it does not end in time."""
        if self._thread is not None:
            self._thread.join(STAGING_S)
            if self._thread.is_alive():
                raise WeightSyncError(
                    f"{self._thread.name} did not end within {STAGING_S:g} s; the engine must restart"
                )

    def served(self) -> None:
        """The version is served now."""
        self._wanted = None

    def _run(
        self,
        older: threading.Thread | None,
        manifest: Manifest,
        published: Mapping[str, torch.Tensor],
        ended: StagingEnded,
        first: Callable[[], None],
    ) -> None:
        if older is not None:
            older.join()
        failed: BaseException | None = None
        try:
            first()
            self.stage(manifest, published)
        except BaseException as error:  # noqa: BLE001  the next call for the version raises it
            # The frames of the traceback hold device memory, which the engine may need.
            failed = error.with_traceback(None)
            failed.__context__ = None
            self.discard()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        self._ended = {manifest.version: failed}
        ended(failed)


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a separate stream of a CUDA device, which does not wait for the engine."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
