# SPDX-License-Identifier: Apache-2.0
"""A CancelledError stops a stage only if the run is being stopped; any other one is an error.

asyncio takes a task that raises CancelledError for one that was cancelled on purpose: no `wait` returns for
it, and the rest of the run would wait for the stage until a deadline passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...errors import StrayCancellation


@contextmanager
def no_stray_cancellation(who: Callable[[], str], stopping: Callable[[], bool]) -> Iterator[None]:
    """Raise StrayCancellation for a CancelledError that leaves the block while nothing is `stopping`."""
    try:
        yield
    except asyncio.CancelledError as error:
        if stopping():
            raise
        raise StrayCancellation(
            f"{who()} raised CancelledError, but the run is not being stopped; its code must handle the "
            "cancellation of each task or scope that it awaits"
        ) from error
