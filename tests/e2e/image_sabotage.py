# SPDX-License-Identifier: Apache-2.0
"""Sabotage the loads of image engines: a tensor that is not delivered, or a process that dies in a load.

verl imports it in each process of a job whose VERL_USE_EXTERNAL_MODULES names it. Each file in FOLDER is a
fault, which the first engine that takes it has in its first process; engines that are restarted have none.
Without FOLDER, as in the process of the tests, it changes nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from recipe.async_pipeline.diffusion.transformer_adapter import TransformerAdapter

FOLDER = "ASYNC_PIPELINE_SABOTAGE"
TENSOR = "transformer_blocks.0.attn.to_q.weight"
BUFFER = "pos_embed.pos_embed"
ADAPTER = "transformer_blocks.0.attn.to_q.lora_A.weight"
KILLED = "killed"
"""The fault of a process that dies in a load."""
KILLED_AT = 2
"""The version that it loads."""
_load, _commit = TransformerAdapter.load, TransformerAdapter.commit


@cache
def fault() -> str | None:
    """Return the fault of this process, the name of a tensor or KILLED; None if no fault is left."""
    for file in sorted(Path(os.environ[FOLDER]).glob("*.fault")):
        try:
            file.rename(file.with_suffix(".taken"))
        except FileNotFoundError:
            continue
        return file.stem
    return None


def load(self: TransformerAdapter, pieces: Iterable[Sequence[tuple[str, torch.Tensor]]]) -> None:
    """Leave a tensor out, and serve zeros for it: at first, engines have the weights that are published."""
    wanted = fault()
    for name, served in self.tensors().items():
        if wanted is not None and name.endswith(wanted):
            served.zero_()
    _load(self, ([one for one in piece if wanted is None or not one[0].endswith(wanted)] for piece in pieces))


def commit(self: TransformerAdapter, manifest: Any, piece_bytes: int) -> Any:
    if manifest.version == KILLED_AT and fault() == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    return _commit(self, manifest, piece_bytes)


if FOLDER in os.environ:
    TransformerAdapter.load = load  # type: ignore[method-assign]
    TransformerAdapter.commit = commit  # type: ignore[method-assign]
