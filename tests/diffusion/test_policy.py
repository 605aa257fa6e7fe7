# SPDX-License-Identifier: Apache-2.0
"""The log-probs of recorded steps: the sampler's bits, in any batch, with a gradient."""

from __future__ import annotations

import math

import pytest
import torch

from recipe.async_pipeline.diffusion.sde import ROWS, evaluate, transition, velocities
from tests.fakes.tiny_flow import SHAPE, Field, schedule

STEPS = torch.tensor([[0, 1], [2, 3], [1, 2]])
CONDITIONS = {"prompt": torch.randn(3, 5, generator=torch.Generator().manual_seed(1))}


def latents() -> torch.Tensor:
    return torch.randn(3, 3, *SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 24])
def test_every_forward_has_the_same_number_of_rows(rows: int) -> None:
    field, draw = Field(), torch.Generator().manual_seed(0)
    x, sigma = torch.randn(rows, *SHAPE, generator=draw), torch.rand(rows, dtype=torch.float64)
    conditions = {"prompt": torch.randn(rows, 5, generator=draw)}
    found = velocities(field, x, sigma, conditions)
    assert found.shape == x.shape
    assert field.rows == [8] * math.ceil(rows / 8)
    torch.testing.assert_close(found, field(x, sigma.float(), conditions))


@pytest.mark.parametrize("kind", ["sde", "cps", "dance_sde"])
def test_each_step_is_evaluated_at_its_place(kind: str) -> None:
    field, x = Field(), latents()
    found = evaluate(
        field,
        latents=x,
        steps=STEPS,
        conditions=CONDITIONS,
        schedule=schedule(),
        kind=kind,  # type: ignore[arg-type]
        noise_level=0.6,
    )
    for sample in range(3):
        for position in range(2):
            interval = schedule().at(STEPS[sample, position].view(1))
            step = transition(kind, interval, 0.6)  # type: ignore[arg-type]
            of_sample = {"prompt": CONDITIONS["prompt"][sample : sample + 1]}
            before, after = (x[sample : sample + 1, position + i] for i in (0, 1))
            mean = step.mean(before, velocities(field, before, interval.sigma, of_sample))
            assert torch.equal(found.means[sample, position], mean[0])
            assert torch.equal(found.log_probs[sample, position], step.log_prob(after, mean)[0])


def test_filled_rows_add_nothing_to_the_gradient() -> None:
    def gradient(field: Field) -> torch.Tensor:
        given = {"latents": latents(), "steps": STEPS, "conditions": CONDITIONS, "schedule": schedule()}
        evaluate(field, kind="sde", noise_level=0.7, **given).log_probs.sum().backward()  # type: ignore[arg-type]
        return torch.cat([p.grad.flatten() for p in field.parameters() if p.grad is not None])

    filled = gradient(Field())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipe.async_pipeline.diffusion.sde.ROWS", 1)
        plain = gradient(Field())
    assert ROWS == 8 and filled.abs().max() > 0
    torch.testing.assert_close(filled, plain, rtol=1e-4, atol=1e-6)
