# SPDX-License-Identifier: Apache-2.0
"""SGLang's engine adapter: one rank of the engine, in its scheduler's process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from ....errors import WeightSyncError
from ....weight_sync.engine.engine_adapter import Delivered, Expected
from ....weight_sync.engine.recording_adapter import RecordingAdapter
from ....weight_sync.engine.standby import Named, StagingEnded, ignore
from ....weight_sync.memory.manifest import Manifest, TensorEntry
from ..served_parts import require_fresh_products, served_tensors
from .layout import packed_modules, served_layout
from .lora import ServedAdapter


class SGLangAdapter(RecordingAdapter):
    """One rank of SGLang; see `EngineAdapter`."""

    def __init__(self, model: torch.nn.Module, device: torch.device, manager: Any = None) -> None:
        """`manager` is SGLang's `LoRAManager`, or None if the engine serves no adapters."""
        super().__init__(device)
        self._model, self._table = model, served_layout(model)
        self._adapter = ServedAdapter(manager, packed_modules(model)) if manager is not None else None

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return dict(served_tensors(self._model))

    def load(self, pieces: Iterable[Sequence[Named]]) -> None:
        with submitting_nothing():
            self._model.load_weights(chain.from_iterable(pieces))  # type: ignore[operator]

    def finish(self) -> None:
        """SGLang repacks nothing that this package allows; see `sglang_rules.py`."""
        require_fresh_products(self._model)

    def expected(self, entry: TensorEntry) -> Expected | None:
        return self._table.expected(entry)

    def prepare(self, manifest: Manifest, ended: StagingEnded = ignore) -> bool:
        return manifest.adapter is None and super().prepare(manifest, ended)

    def commit(self, manifest: Manifest, piece_bytes: int) -> Delivered:
        if manifest.adapter is None:
            return super().commit(manifest, piece_bytes)
        if self._adapter is None:
            raise WeightSyncError(
                f"v{manifest.version} is a LoRA adapter, but SGLang was started without them"
            )
        self._adapter.replace(manifest, manifest.adapter, self.published(manifest))
        return self._adapter.delivered(manifest)

    def seal(self) -> None:
        """Nothing: weights are used as they were loaded."""


@contextmanager
def submitting_nothing() -> Iterator[None]:
    """Let this thread do itself what it submits to a pool of threads: only its copies are recorded."""
    submit, own = ThreadPoolExecutor.submit, threading.get_ident()

    def run_here(pool: ThreadPoolExecutor, function: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        if threading.get_ident() != own:
            return submit(pool, function, *arguments, **named)
        done: Future[Any] = Future()
        try:
            done.set_result(function(*arguments, **named))
        except Exception as error:  # noqa: BLE001 - the loader raises it when it asks for the result
            done.set_exception(error)
        return done

    ThreadPoolExecutor.submit = run_here  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
