# SPDX-License-Identifier: Apache-2.0
"""Noise levels fall from 1 to 0, shifted as Stable Diffusion 3 is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.diffusion.schedule import (
    NoiseInterval,
    NoiseSchedule,
    joined,
    shifted,
    shifted_schedule,
)
from recipe.async_pipeline.errors import ConfigError


@given(
    num_steps=st.integers(1, 50),
    shift=st.floats(0.2, 20, allow_nan=False),
    last=st.floats(1e-3, 0.5, allow_nan=False),
)
def test_levels_fall_from_one_to_zero(num_steps: int, shift: float, last: float) -> None:
    schedule = shifted_schedule(num_steps, shift=shift, last=last)
    assert schedule.num_steps == num_steps
    assert schedule.sigmas[0] == 1 and schedule.sigmas[-1] == 0
    assert bool((schedule.sigmas.diff() < 0).all())
    if num_steps > 1:
        assert float(schedule.sigmas[-2]) == pytest.approx(shift * last / (1 + (shift - 1) * last))


def test_the_shift_moves_times_towards_noise_and_keeps_the_ends() -> None:
    times = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    assert shifted(times, 3.0).tolist() == pytest.approx([0, 0.5, 0.75, 1])
    assert shifted(times, 1.0).tolist() == times.tolist()


def test_an_interval_has_the_levels_around_a_step() -> None:
    schedule = NoiseSchedule(torch.tensor([1.0, 0.75, 0.5, 0.0], dtype=torch.float64))
    interval = schedule.at(torch.tensor([0, 2]))
    assert interval.sigma.tolist() == [1.0, 0.5]
    assert interval.next.tolist() == [0.75, 0.0]
    assert interval.second.tolist() == [0.75, 0.75]
    assert interval.dt.tolist() == [-0.25, -0.5]


def test_intervals_of_different_schedules_form_one_batch() -> None:
    short = shifted_schedule(2, shift=1.0, last=0.5).at(torch.tensor([1]))
    long = shifted_schedule(4, shift=1.0, last=0.25).at(torch.tensor([0, 3]))
    both = joined([short, long])
    assert isinstance(both, NoiseInterval)
    assert both.sigma.tolist() == [0.5, 1.0, 0.25]
    assert both.second.tolist() == [0.5, 0.75, 0.75]


@pytest.mark.parametrize("levels", [[1.0], [1.0, 0.5], [0.9, 0.0], [1.0, 0.5, 0.5, 0.0], [0.0, 1.0]])
def test_other_levels_are_refused(levels: list[float]) -> None:
    with pytest.raises(ConfigError, match="must fall from 1 to 0"):
        NoiseSchedule(torch.tensor(levels, dtype=torch.float64))


@pytest.mark.parametrize(
    ("num_steps", "shift", "last", "error"),
    [
        (0, 3.0, 0.1, "num_inference_steps must be >= 1, got 0"),
        (10, 0.0, 0.1, "shift must be > 0"),
        (10, 3.0, 0.0, "last time in"),
        (10, 3.0, 1.0, "need a last time below 1"),
    ],
)
def test_a_schedule_that_does_not_exist_is_refused(
    num_steps: int, shift: float, last: float, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        shifted_schedule(num_steps, shift=shift, last=last)


@pytest.mark.parametrize("num_steps", [4, 10, 28])
def test_it_is_the_schedule_of_the_library(num_steps: int) -> None:
    """What diffusers samples Stable Diffusion 3 with; its last time is the smallest one of training."""
    schedulers = pytest.importorskip("diffusers.schedulers")
    theirs = schedulers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    theirs.set_timesteps(num_steps)
    mine = shifted_schedule(num_steps, shift=3.0, last=float(shifted(torch.tensor(0.001), 3.0)))
    assert mine.sigmas.tolist() == pytest.approx(theirs.sigmas.tolist(), abs=1e-6)
