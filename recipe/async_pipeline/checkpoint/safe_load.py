# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are read as tensors and plain values: a file that is somebody else's runs nothing when it is
loaded.

verl asks `torch.load` to unpickle whatever is in a file. What its checkpoints hold needs no more than this.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed.tensor  # its classes may be in a checkpoint

from ..errors import CheckpointError

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""torch's own switch, which overrules what the caller of `torch.load` says."""
_OF_RANDOM_STATE = [np.zeros(0).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype(np.uint32))]


@contextmanager
def weights_only(folder: Path) -> Iterator[None]:
    """Inside, `torch.load` reads nothing else. `folder`: what is loaded, for the message.

    Raises CheckpointError: something else is in a file; nothing of it has run.
    """
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(_OF_RANDOM_STATE):
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
