# SPDX-License-Identifier: Apache-2.0
"""Ranks that are forks of a process which has imported the stack: the import takes longer than their work."""

from __future__ import annotations

import gc
import io
import multiprocessing
import traceback
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from multiprocessing.connection import Connection


def fork_ranks(run: Callable[[int], None], ranks: Iterable[int]) -> dict[int, str]:
    """Run each rank in a fork; return what each printed, with the traceback of its error."""
    context = multiprocessing.get_context("fork")
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all pages of this process
    started = []
    for rank in ranks:
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(run, rank, sending))
        process.start()
        sending.close()
        started.append((rank, process, receiving))

    printed = {}
    for rank, process, receiving in started:
        with receiving:
            try:
                printed[rank] = receiving.recv()
            except EOFError:
                printed[rank] = "the process died"
        process.join()
    return printed


def _run(run: Callable[[int], None], rank: int, sending: Connection) -> None:
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            run(rank)
    except BaseException:
        traceback.print_exc(file=printed)
        raise
    finally:
        sending.send(printed.getvalue())
