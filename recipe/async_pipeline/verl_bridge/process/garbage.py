# SPDX-License-Identifier: Apache-2.0
"""Keep the garbage collector away from what lives as long as the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 10_000
"""New objects between two collections; 700 by default. A step of 16,384 responses has a few 100,000."""


def freeze_present_objects() -> None:
    """Leave out all objects that exist now from later collections, and make these rarer.

    For processes that live as long as the run and hold many responses in flight: each full collection would
    visit all modules of verl and torch and all responses.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])


@contextmanager
def present_objects_frozen() -> Iterator[None]:
    """Leave out all objects that exist now from collections within the context.

    A trainer's process has about 800,000 objects when a run starts, most of them modules of verl and torch.
    Each full collection visits them and blocks the event loop meanwhile, for 0.4 s. Collections are also
    rarer, because the objects of a step are in use until it is trained and not garbage.
    """
    before = gc.get_threshold()
    freeze_present_objects()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        # Otherwise they are not collected at exit either, which native modules report as leaks.
        gc.unfreeze()
