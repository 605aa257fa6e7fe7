# SPDX-License-Identifier: Apache-2.0
"""Load checkpoints as tensors and plain values only, so that a malicious file cannot run code.

verl has `torch.load` unpickle arbitrary objects; the checkpoints that it writes do not need that.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed.tensor  # makes its classes known to the unpickler

from ..errors import CheckpointError

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""torch's own switch; it overrides the `weights_only` argument of `torch.load`."""
_RANDOM_STATE_TYPES = [np.zeros(0).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype(np.uint32))]


@contextmanager
def weights_only(folder: Path) -> Iterator[None]:
    """Restrict `torch.load` to tensors and plain values. `folder` is named in errors.

    Raises CheckpointError if a file holds other objects; none of their code has run.
    """
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"

    try:
        with torch.serialization.safe_globals(_RANDOM_STATE_TYPES):
            yield
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{folder} holds more than tensors and plain values, and was not loaded: "
            f"{str(error).splitlines()[0]}"
        ) from error
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before
