# SPDX-License-Identifier: Apache-2.0
"""A sample's random numbers follow from its names alone."""

from __future__ import annotations

import torch

from recipe.async_pipeline.diffusion.seeds import seed_of, stream


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
