# SPDX-License-Identifier: Apache-2.0
"""Guard's ratio has a closed form, in which the noise level of the step does not occur."""

from __future__ import annotations

import pytest
import torch

from recipe.async_pipeline.diffusion.guard import guard_weight, guarded_log_ratio
from recipe.async_pipeline.diffusion.schedule import shifted_schedule
from recipe.async_pipeline.diffusion.sde import SdeKind, Transition, transition
from recipe.async_pipeline.errors import ConfigError

SCHEDULE = shifted_schedule(10, shift=3.0, last=0.1)
STEPS = torch.tensor([0, 2, 5, 8])


def sample(
    kind: SdeKind, steps: torch.Tensor = STEPS
) -> tuple[Transition, dict[str, torch.Tensor], torch.Tensor]:
    """A step, the arguments of the ratio, and the noise that was drawn."""
    draw = torch.Generator().manual_seed(0)
    step = transition(kind, SCHEDULE.at(steps), 0.7)
    old_mean, moved, noise = (torch.randn(4, 3, 8, 8, generator=draw)[: len(steps)] for _ in range(3))
    mean = old_mean + 0.01 * moved
    after = step.sample(old_mean, noise)
    of_step = {
        "log_prob": step.log_prob(after, mean),
        "old_log_prob": step.log_prob(after, old_mean),
        "mean": mean,
        "old_mean": old_mean,
    }
    return step, of_step, noise


@pytest.mark.parametrize("kind", ["sde", "dance_sde"])
def test_the_ratio_is_noise_times_movement_at_every_noise_level(kind: SdeKind) -> None:
    step, given, noise = sample(kind)
    wanted = (noise * (given["mean"] - given["old_mean"])).flatten(1).mean(1)
    torch.testing.assert_close(guarded_log_ratio(step, **given), wanted, rtol=1e-2, atol=2e-6)


def test_it_is_unbiased_where_the_plain_ratio_is_not() -> None:
    """Over many draws of the noise the guarded log-ratio is 0 on average, the plain one negative."""
    step = transition("sde", SCHEDULE.at(torch.full((4000,), 5)), 0.7)
    noise = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
    old_mean, mean = torch.zeros(4000, 16), torch.full((4000, 16), 0.2)
    after = step.sample(old_mean, noise)
    plain = step.log_prob(after, mean) - step.log_prob(after, old_mean)
    guarded = guarded_log_ratio(
        step,
        log_prob=step.log_prob(after, mean),
        old_log_prob=step.log_prob(after, old_mean),
        mean=mean,
        old_mean=old_mean,
    )
    error = 4 * float(guarded.std()) / 4000**0.5
    assert abs(float(guarded.mean())) < error
    assert float(plain.mean()) < -4 * float(plain.std()) / 4000**0.5


def test_a_sample_has_the_same_ratio_alone_and_among_samples_at_other_steps() -> None:
    step, given, _ = sample("sde")
    together, weights = guarded_log_ratio(step, **given), guard_weight(step)
    for row in range(4):
        one = transition("sde", SCHEDULE.at(STEPS[row : row + 1]), 0.7)
        alone = guarded_log_ratio(one, **{name: value[row : row + 1] for name, value in given.items()})
        assert torch.equal(alone, together[row : row + 1])
        assert torch.equal(guard_weight(one), weights[row : row + 1])


def test_the_weight_is_the_length_of_the_step() -> None:
    step, _, _ = sample("sde")
    lengths = SCHEDULE.sigmas[STEPS] - SCHEDULE.sigmas[STEPS + 1]
    torch.testing.assert_close(guard_weight(step), (1 / lengths).float())


def test_the_same_policy_has_the_ratio_one_and_a_gradient() -> None:
    step, given, noise = sample("sde")
    mean = given["old_mean"].clone().requires_grad_(True)
    after = step.sample(given["old_mean"], noise)
    old = given["old_log_prob"]
    log_ratio = guarded_log_ratio(
        step, log_prob=step.log_prob(after, mean), old_log_prob=old, mean=mean, old_mean=given["old_mean"]
    )
    assert log_ratio.tolist() == [0.0] * 4
    log_ratio.sum().backward()
    assert mean.grad is not None
    torch.testing.assert_close(mean.grad, noise / noise[0].numel(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["cps", "ode"])
def test_a_log_prob_that_is_no_density_is_refused(kind: SdeKind) -> None:
    step = transition(kind, SCHEDULE.at(STEPS), 0.7)
    x = torch.zeros(4, 2)
    with pytest.raises(ConfigError, match=f"sde_type {kind} has not; set sde or dance_sde"):
        guarded_log_ratio(step, log_prob=x[:, 0], old_log_prob=x[:, 0], mean=x, old_mean=x)
    with pytest.raises(ConfigError, match="grpo_guard needs"):
        guard_weight(step)
