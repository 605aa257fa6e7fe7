# SPDX-License-Identifier: Apache-2.0
"""A window is inside its range, the same for a group, and at different places for different groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.diffusion.windows import (
    EveryStep,
    RandomWindow,
    SdeWindow,
    seed_of,
    stream,
    windows,
)
from recipe.async_pipeline.errors import ConfigError


def test_a_window_has_its_steps() -> None:
    assert list(SdeWindow(2, 3).steps) == [2, 3, 4]


def test_all_steps_but_the_last() -> None:
    assert windows(10, None, None) == EveryStep(num_steps=10)
    assert EveryStep(num_steps=10).of(1, 0) == SdeWindow(0, 9)


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.data())
def test_a_random_window_is_in_its_range_and_belongs_to_its_group(
    group: int, update: int, data: st.DataObject
) -> None:
    num_steps = data.draw(st.integers(2, 40))
    first = data.draw(st.integers(0, num_steps - 2))
    end = data.draw(st.integers(first + 1, num_steps - 1))
    size = data.draw(st.integers(1, end - first))
    chosen = windows(num_steps, size, [first, end])
    window = chosen.of(group, update)
    assert first <= window.start and window.start + window.size <= end
    assert window == chosen.of(group, update + 1), "the group decides, not the time"


def test_all_places_are_drawn() -> None:
    chosen = RandomWindow(size=3, first=0, end=5, num_steps=10)
    starts = [chosen.of(group, 0).start for group in range(300)]
    assert {start: starts.count(start) > 60 for start in set(starts)} == {0: True, 1: True, 2: True}


def test_a_window_without_a_range_may_be_anywhere_before_the_last_step() -> None:
    assert windows(10, 3, None) == RandomWindow(size=3, first=0, end=9, num_steps=10)


@pytest.mark.parametrize(
    ("size", "within", "num_steps"),
    [
        (0, (0, 5), 10),
        (6, (0, 5), 10),
        (3, (-1, 5), 10),
        (3, (0, 10), 10),
        (1, (5, 5), 10),
    ],
    ids=["empty", "too long", "negative", "with the last step", "an empty range"],
)
def test_a_window_that_does_not_fit_is_refused(size: int, within: tuple[int, int], num_steps: int) -> None:
    with pytest.raises(ConfigError, match=f"an SDE window of {size} steps does not fit into"):
        RandomWindow(size=size, first=within[0], end=within[1], num_steps=num_steps)


def test_one_step_has_no_window() -> None:
    with pytest.raises(ConfigError, match="before the last step"):
        EveryStep(num_steps=1)


def test_a_range_has_two_ends() -> None:
    with pytest.raises(ConfigError, match=r"sde_window_range must be \[first, end\], got \[0\]"):
        windows(10, 3, [0])


def test_equal_parts_give_equal_numbers() -> None:
    first, second = (torch.randn(5, generator=stream(7, "prompt", 3)) for _ in range(2))
    assert torch.equal(first, second)


def test_other_parts_give_other_numbers() -> None:
    parts: list[tuple[int | str, ...]] = [
        (7, "a", 3),
        (7, "a", 4),
        (8, "a", 3),
        (7, "a3"),
        (7, "a", "3"),
        ("7", "a", 3),
        (7, "a"),
        (),
    ]
    seeds = {seed_of(*one) for one in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_do_not_depend_on_the_process() -> None:
    assert seed_of("window", 5) == 8727732299630024320
