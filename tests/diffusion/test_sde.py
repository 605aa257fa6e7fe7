# SPDX-License-Identifier: Apache-2.0
"""The Gaussian of a step against the formulas of the papers, and against what an SDE must do: keep the
marginal distributions of the ODE.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal

from recipe.async_pipeline.diffusion.schedule import NoiseInterval, NoiseSchedule, shifted_schedule
from recipe.async_pipeline.diffusion.sde import KINDS, SdeKind, Transition, transition
from recipe.async_pipeline.errors import ConfigError

SCHEDULE = shifted_schedule(10, shift=3.0, last=0.1)
STOCHASTIC: tuple[SdeKind, ...] = ("sde", "cps", "dance_sde")
SHAPE = (9, 4, 3, 3)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, velocity, after = (torch.randn(*SHAPE, generator=draw) for _ in range(3))
    return x, velocity, after


def every_step() -> NoiseInterval:
    return SCHEDULE.at(torch.arange(9))


def column(values: torch.Tensor) -> torch.Tensor:
    return values.view(-1, 1, 1, 1)


# The papers' formulas, term by term.


def test_the_step_of_flow_grpo() -> None:
    x, v, _ = batch()
    interval, a = every_step(), 0.7
    sigma, dt = column(interval.sigma), column(interval.dt)
    g = a * torch.sqrt(sigma / (1 - torch.where(sigma == 1, SCHEDULE.sigmas[1], sigma)))
    mean = x + (v + g**2 / (2 * sigma) * (x + (1 - sigma) * v)) * dt
    step = transition("sde", interval, a)
    torch.testing.assert_close(step.mean(x, v), mean.float())
    torch.testing.assert_close(step.std, (g * torch.sqrt(-dt)).flatten())


def test_the_step_of_dance_grpo() -> None:
    """Its score is written with the predicted data; sigma^2 is the variance of x given the data."""
    x, v, _ = batch()
    interval, a = every_step(), 0.3
    sigma, dt = column(interval.sigma), column(interval.dt)
    data = x - sigma * v
    score = -(x - (1 - sigma) * data) / sigma**2
    step = transition("dance_sde", interval, a)
    torch.testing.assert_close(step.mean(x, v), (x + v * dt - a**2 / 2 * score * dt).float())
    torch.testing.assert_close(step.std, a * (-interval.dt).sqrt())


def test_the_step_of_coefficients_preserving_sampling() -> None:
    x, v, _ = batch()
    interval, a = every_step(), 0.8
    sigma, after = column(interval.sigma), column(interval.next)
    std = after * math.sin(a * math.pi / 2)
    data, noise = x - sigma * v, x + (1 - sigma) * v
    step = transition("cps", interval, a)
    torch.testing.assert_close(
        step.mean(x, v), ((1 - after) * data + torch.sqrt(after**2 - std**2) * noise).float()
    )
    torch.testing.assert_close(step.std, std.flatten())


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_each_kind_is_the_ode(kind: SdeKind) -> None:
    x, v, _ = batch()
    interval = every_step()
    step = transition(kind, interval, 0.0)
    torch.testing.assert_close(step.mean(x, v), x + v * column(interval.dt).float(), rtol=1e-5, atol=1e-6)
    assert step.std.tolist() == [0.0] * 9


def test_the_ode_ignores_the_noise_level() -> None:
    assert transition("ode", every_step(), 0.7).std.tolist() == [0.0] * 9


# An SDE keeps the marginal distributions. With Gaussian data everything stays Gaussian, and a step maps mean
# and variance in closed form.

levels = st.lists(st.floats(0.02, 0.98), min_size=1, max_size=6, unique=True)


def moments_after(
    kind: SdeKind, schedule: NoiseSchedule, a: float, *, center: float, spread: float
) -> tuple[float, float]:
    """Mean and variance of samples of the exact velocity field of data with this mean and spread."""
    mean, variance = 0.0, 1.0
    for index in range(schedule.num_steps):
        interval = schedule.at(torch.tensor([index]))
        step = transition(kind, interval, a)
        s = float(interval.sigma)
        of_x = (s - (1 - s) * spread**2) / ((1 - s) ** 2 * spread**2 + s**2)
        slope = float(step.of_x) + float(step.of_velocity) * of_x
        offset = float(step.of_velocity) * (-center - of_x * (1 - s) * center)
        mean, variance = slope * mean + offset, slope**2 * variance + float(step.std) ** 2
    return mean, variance


@pytest.mark.parametrize(("kind", "a"), [("sde", 0.7), ("dance_sde", 0.5), ("cps", 0.5), ("ode", 0.0)])
def test_fine_steps_end_in_the_distribution_of_the_data(kind: SdeKind, a: float) -> None:
    """The noise of cps per step does not shrink with the step, so its field error does not vanish."""
    schedule = shifted_schedule(4000, shift=1.0, last=1 / 4000)
    mean, variance = moments_after(kind, schedule, a, center=1.5, spread=0.5)
    assert mean == pytest.approx(1.5, abs=0.01)
    if kind != "cps":
        assert variance == pytest.approx(0.25, rel=0.02)


@given(levels, st.floats(-3, 3), st.floats(0, 1))
def test_cps_keeps_every_noise_level_exactly(between: list[float], center: float, a: float) -> None:
    """The property it is named after: with one image as data, after a step of any size x' has the mean
    (1 - s') x_0 and the variance s'^2.
    """
    levels = torch.tensor([1.0, *sorted(between, reverse=True), 0.0], dtype=torch.float64)
    mean, variance = 0.0, 1.0
    for s, after in zip(levels[:-1], levels[1:], strict=True):
        interval = NoiseInterval(s[None], after[None], levels[1:2])
        step = transition("cps", interval, a)
        # The exact velocity of one image: (x - x_0) / s.
        slope = float(step.of_x + step.of_velocity / s)
        mean = slope * mean - float(step.of_velocity / s) * center
        variance = slope**2 * variance + float(step.std) ** 2
        assert mean == pytest.approx(float(1 - after) * center, abs=1e-9)
        assert variance == pytest.approx(float(after) ** 2, abs=1e-9)


@settings(deadline=None)
@given(levels, st.floats(0.01, 2.0))
def test_dance_is_flow_grpo_with_another_diffusion(between: list[float], a: float) -> None:
    levels = torch.tensor([1.0, *sorted(between, reverse=True), 0.0], dtype=torch.float64)
    interval = NoiseSchedule(levels).at(torch.arange(1, len(levels) - 1))
    dance = transition("dance_sde", interval, a)
    for row, s in enumerate(interval.sigma.tolist()):
        same = transition(
            "sde", NoiseInterval(*(one[row : row + 1] for one in interval)), a * math.sqrt((1 - s) / s)
        )
        assert float(dance.of_x[row]) == pytest.approx(float(same.of_x))
        assert float(dance.of_velocity[row]) == pytest.approx(float(same.of_velocity))
        assert float(dance.std[row]) == pytest.approx(float(same.std))


# Samples and log-probs.


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_samples_have_the_mean_and_the_std(kind: SdeKind) -> None:
    step = transition(kind, SCHEDULE.at(torch.tensor([3])), 0.6)
    mean = torch.full((1, 200_000), 0.25)
    drawn = step.sample(mean, torch.randn(1, 200_000, generator=torch.Generator().manual_seed(1)))
    assert float(drawn.mean()) == pytest.approx(0.25, abs=0.01)
    assert float(drawn.std()) == pytest.approx(float(step.std), rel=0.01)


@pytest.mark.parametrize("kind", ["sde", "dance_sde"])
def test_the_log_prob_is_the_density_averaged_over_elements(kind: SdeKind) -> None:
    x, v, after = batch()
    step = transition(kind, every_step(), 0.7)
    mean = step.mean(x, v)
    density = Normal(mean.double(), column(step.std)).log_prob(after.double())
    torch.testing.assert_close(step.log_prob(after, mean), density.flatten(1).mean(1).float())


def test_the_log_prob_of_cps_is_the_squared_distance_alone() -> None:
    x, v, after = batch()
    step = transition("cps", every_step(), 0.8)
    mean = step.mean(x, v)
    torch.testing.assert_close(step.log_prob(after, mean), -(after - mean).square().flatten(1).mean(1))


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_a_row_has_the_same_bits_in_every_batch(kind: SdeKind) -> None:
    x, v, after = batch()
    whole = transition(kind, every_step(), 0.7)
    log_probs = whole.log_prob(after, whole.mean(x, v))
    for row in range(9):
        alone = transition(kind, SCHEDULE.at(torch.tensor([row])), 0.7)
        mean = alone.mean(x[row : row + 1], v[row : row + 1])
        assert torch.equal(mean, whole.mean(x, v)[row : row + 1])
        assert torch.equal(alone.log_prob(after[row : row + 1], mean), log_probs[row : row + 1])


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_the_gradient_pulls_the_mean_to_the_sample(kind: SdeKind) -> None:
    x, v, after = batch()
    v.requires_grad_(True)
    after.requires_grad_(True)
    step = transition(kind, every_step(), 0.7)
    mean = step.mean(x, v)
    step.log_prob(after, mean).sum().backward()
    assert after.grad is None, "the sample is a constant"
    factor = torch.ones(9, dtype=torch.float64) if kind == "cps" else 1 / (2 * step.std**2)
    elements = math.prod(SHAPE[1:])
    expected = 2 * (after - mean).detach() * column(factor * step.of_velocity).float() / elements
    assert v.grad is not None
    torch.testing.assert_close(v.grad, expected)


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_the_entropy_is_that_of_a_gaussian(kind: SdeKind) -> None:
    step = transition(kind, every_step(), 0.7)
    torch.testing.assert_close(step.entropy(), Normal(torch.zeros(9), step.std).entropy().float())


# What does not exist.


@pytest.mark.parametrize(
    ("kind", "step", "a"),
    [("ode", 3, 0.7), ("sde", 3, 0.0), ("cps", 9, 0.8)],
    ids=["ode", "no noise", "last step of cps"],
)
def test_a_step_without_noise_has_no_log_prob(kind: SdeKind, step: int, a: float) -> None:
    fixed = transition(kind, SCHEDULE.at(torch.tensor([step])), a)
    x = torch.zeros(1, 4)
    with pytest.raises(ConfigError, match="a step without noise has no log-prob"):
        fixed.log_prob(x, x)
    with pytest.raises(ConfigError, match="has no log-prob"):
        fixed.entropy()


@pytest.mark.parametrize(
    ("kind", "a", "error"),
    [
        ("ddpm", 0.7, "sde_type must be one of sde, cps, dance_sde, ode, got 'ddpm'"),
        ("cps", 1.1, r"noise_level must be in \[0, 1\] for sde_type cps, got 1.1"),
        ("sde", -0.1, "noise_level must be finite and >= 0"),
        ("sde", math.nan, "noise_level must be finite and >= 0"),
        ("dance_sde", math.inf, "noise_level must be finite and >= 0"),
    ],
)
def test_unknown_noise_is_refused(kind: SdeKind, a: float, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        transition(kind, every_step(), a)


def test_coefficients_are_in_double_precision() -> None:
    step = transition("sde", every_step(), 0.7)
    assert isinstance(step, Transition)
    assert {one.dtype for one in (step.of_x, step.of_velocity, step.std)} == {torch.float64}
