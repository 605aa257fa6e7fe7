# SPDX-License-Identifier: Apache-2.0
"""FrozenLake in text agrees with gymnasium on every board, place and action."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from recipe.async_pipeline.agents.environment import Step
from recipe.async_pipeline.agents.frozen_lake import ACTIONS, MOVES, TILE, FrozenLake, board_of

pytest.importorskip("gymnasium")
BOARD = ("SFFF", "FHFH", "FFFH", "HFFG")


def test_an_episode() -> None:
    lake = FrozenLake()
    assert lake.reset(1, board=list(BOARD)) == "P...\n.O.O\n...O\nO..G\n#..#>"
    assert lake.step("L") == Step("#..#>"), "the edge"
    assert lake.step("D") == Step("#.O.>")
    for action in "DRD":
        assert not lake.step(action).over
    assert lake.reset(1, board=list(BOARD)) == "P...\n.O.O\n...O\nO..G\n#..#>"
    assert [lake.step(action).reward for action in "DDRDRR"] == [0, 0, 0, 0, 0, 1]


def test_a_hole_ends_it_without_a_reward() -> None:
    lake = FrozenLake()
    lake.reset(1, board=list(BOARD))
    lake.step("D")
    found = lake.step("R")
    assert (found.over, found.reward, found.invalid) == (True, 0.0, False)


@pytest.mark.parametrize("text", ["", "l", "LD", "L\n", "X", "0"])
def test_any_other_text_ends_it_as_invalid(text: str) -> None:
    lake = FrozenLake()
    lake.reset(1, board=list(BOARD))
    assert lake.step(text) == Step("#..#>", 0.0, over=True, invalid=True)


def test_a_seed_has_one_board() -> None:
    lake = FrozenLake()
    first = [lake.reset(seed) for seed in range(8)]
    assert [lake.reset(seed) for seed in range(8)] == first and len(set(first)) > 4
    assert lake.board == board_of(7)


@given(st.integers(0, 10_000), st.lists(st.sampled_from(ACTIONS), max_size=20), st.integers(4, 6))
def test_it_moves_as_the_text_says(seed: int, actions: list[str], size: int) -> None:
    lake = FrozenLake(size=size)
    board = lake.reset(seed).splitlines()
    view, (row, column) = board.pop(), (0, 0)
    board[0] = board[0].replace("P", ".", 1)
    for action in actions:
        seen = view[ACTIONS.index(action)]
        found = lake.step(action)
        if seen != "#":
            down, right = MOVES[ACTIONS.index(action)]
            row, column = row + down, column + right
            assert board[row][column] == seen
        assert found.over == (seen in "OG") and found.reward == (seen == "G")
        if found.over:
            return
        view = found.observation
        around = [(row + down, column + right) for down, right in MOVES]
        shown = [board[r][c] if 0 <= r < size and 0 <= c < size else "#" for r, c in around]
        assert view == "".join(shown) + ">"


def test_a_board_is_drawn_with_the_player_on_it() -> None:
    lake = FrozenLake(pictures=True)
    file, end = lake.reset(1, board=list(BOARD))
    before = Image.open(io.BytesIO(file))
    assert (before.size, end) == ((4 * TILE, 4 * TILE), ">")
    file, end = lake.step("D").observation
    after = Image.open(io.BytesIO(file))
    found = {(row, column): after.getpixel(_middle(row, column)) for row in range(4) for column in range(4)}
    assert {at: colour for at, colour in found.items() if colour != (255, 255, 255)} == {
        (1, 0): (255, 0, 0),
        **dict.fromkeys([(1, 1), (1, 3), (2, 3), (3, 0)], (0, 0, 0)),
        (3, 3): (0, 128, 0),
    }
    assert before.getpixel(_middle(0, 0)) == (255, 0, 0)


def _middle(row: int, column: int) -> tuple[int, int]:
    return TILE * column + TILE // 2, TILE * row + TILE // 2


def test_ice_may_be_slippery() -> None:
    lake = FrozenLake(slippery=True)
    views = set()
    for seed in range(20):
        lake.reset(seed, board=list(BOARD))
        views.add(lake.step("D").observation)
    assert len(views) > 1
