# SPDX-License-Identifier: Apache-2.0
"""A server learns from boards when all ranks of its engine have staged a version."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import StagingError, WeightSyncError
from recipe.async_pipeline.weight_sync.engine.serving_rank import POLL_S, StagingBoard, await_staged
from recipe.async_pipeline.weight_sync.memory.board import Board
from recipe.async_pipeline.weight_sync.memory.segment_names import SHM_DIR

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def boards() -> Iterator[list[StagingBoard]]:
    made = [StagingBoard(), StagingBoard()]
    yield made
    for board in made:
        board.close()


def names(boards: list[StagingBoard]) -> list[str]:
    return [board.name for board in boards]


async def test_a_version_is_staged_once_every_rank_says_so(boards: list[StagingBoard]) -> None:
    loop = asyncio.get_running_loop()
    for board, at in zip(boards, (2.0, 5.0), strict=True):
        board.post(3, None)  # of the version before
        loop.call_later(at, board.post, 4, None)
    await await_staged(names(boards), 4)
    assert 5.0 - POLL_S < loop.time() < 5.0 + 2 * POLL_S


@pytest.mark.parametrize("rank", [0, 1])
async def test_the_error_of_any_rank_reaches_the_server(boards: list[StagingBoard], rank: int) -> None:
    loop = asyncio.get_running_loop()
    boards[rank].post(4, MemoryError("the device is full"))
    loop.call_later(2.0, boards[1 - rank].post, 4, None)
    with pytest.raises(StagingError, match="MemoryError: the device is full"):
        await await_staged(names(boards), 4)
    assert loop.time() > 2.0 - POLL_S, "no rank copies any more"


def test_a_newer_version_ends_the_wait(boards: list[StagingBoard]) -> None:
    boards[0].post(5, None)
    with pytest.raises(WeightSyncError, match="v4 was replaced by v5"):
        run_virtual(await_staged(names(boards), 4))


async def test_a_cleared_board_announces_nothing(boards: list[StagingBoard]) -> None:
    boards[0].post(4, MemoryError("the device is full"))
    boards[0].clear()
    asyncio.get_running_loop().call_later(1.0, boards[0].post, 4, None)
    await await_staged(names(boards[:1]), 4)


def test_foreign_bytes_are_refused() -> None:
    with closing(Board()) as board:
        board.post(b"\xc1")
        with pytest.raises(WeightSyncError, match="not an announcement of a staged version"):
            run_virtual(await_staged([board.name], 4))


ENGINE = """
import multiprocessing
from recipe.async_pipeline.weight_sync.engine.serving_rank import StagingBoard

def engine():
    global board
    board = StagingBoard()
    board.post(1, None)
    print(board.name, flush=True)
"""


@pytest.mark.parametrize(
    "end",
    ["engine()", "p = multiprocessing.get_context('fork').Process(target=engine); p.start(); p.join()"],
    ids=["process", "child"],
)
def test_an_engine_that_ends_leaves_no_board(end: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENGINE + end], check=True, capture_output=True, text=True)
    assert done.stderr == "", "the tracker of resources reports what it has to unlink"
    assert not (SHM_DIR / done.stdout.strip()).exists()


def test_a_copy_that_ends_after_the_engine_announces_nothing() -> None:
    board = StagingBoard()
    board.close()
    board.post(1, None)
    assert not (SHM_DIR / board.name).exists()
