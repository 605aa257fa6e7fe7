# SPDX-License-Identifier: Apache-2.0
"""What SGLang has under different names, from 0.5.12 on. Chosen by what is there, not by its version.

Imports nothing of SGLang: the server's process and the scheduler's have imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any


def sender(manager: Any) -> Callable[[Any], object]:
    """Return the function of a tokenizer manager that puts a message into the scheduler's queue at once."""
    # It encodes messages as both ends have agreed; before, all of them were pickled.
    dispatch: Callable[[Any], object] | None = getattr(manager, "_dispatch_to_scheduler", None)
    return dispatch if dispatch is not None else manager.send_to_scheduler.send_pyobj


def message(content: Any) -> Any:
    """Return a message between server and scheduler in the form that SGLang can send.

    With SGLANG_USE_PICKLE_IPC=0 it sends its own types, and others only as a `PickleWrapper`, which the
    receiver unwraps.
    """
    wrap = getattr(sys.modules.get("sglang.srt.managers.io_struct"), "wrap_as_pickle", None)
    return content if wrap is None else wrap(content)


def ranks(scheduler: Any) -> int:
    """Return the number of ranks of tensor parallelism."""
    return int(scheduler.tp_cpu_group.size())


def middle_chunks(request: Any) -> int:
    """Return how many steps are in flight that read a part of the prompt, but not its end."""
    if hasattr(request, "inflight_middle_chunks"):
        return int(request.inflight_middle_chunks)
    return int(request.is_chunked)


def log_probs(request: Any) -> Sequence[float] | None:
    """Return the log-probs of a request's tokens, or None if they were not requested."""
    values: Sequence[float] | None = getattr(request, "logprob", request).output_token_logprobs_val
    return values
