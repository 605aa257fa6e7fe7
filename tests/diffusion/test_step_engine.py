# SPDX-License-Identifier: Apache-2.0
"""Samples join, leave and get new weights between steps, and none of it changes a bit of another sample."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from recipe.async_pipeline.diffusion.families import StableDiffusion3
from recipe.async_pipeline.diffusion.sde import VelocityField, evaluate
from recipe.async_pipeline.diffusion.step_engine import FinishedSample, SampleRequest, Sampling, StepEngine
from recipe.async_pipeline.diffusion.windows import SdeWindow
from recipe.async_pipeline.errors import ConfigError, WeightSyncError
from tests.fakes.tiny_flow import SHAPE, STEPS, Field, requests, schedule, tiny_conditions, tiny_sd3


def engine_of(field: VelocityField, max_rows: int = 96, version: int = 0) -> StepEngine:
    engine = StepEngine(field, max_rows=max_rows)
    engine.load(version, lambda: None)
    return engine


def run(engine: StepEngine, asked: Sequence[SampleRequest], *, per_step: int) -> dict[str, FinishedSample]:
    """Submit so many samples before each step; return all of them by name."""
    waiting, done = list(asked), dict[str, FinishedSample]()
    while waiting or engine.busy:
        for request in waiting[:per_step]:
            engine.submit(request)
        waiting = waiting[per_step:]
        done |= {sample.name: sample for sample in engine.step()}
    return done


def require_equal(one: FinishedSample, other: FinishedSample) -> None:
    assert (one.name, one.steps, one.spans) == (other.name, other.steps, other.spans)
    for name in ("latent", "latents", "log_probs"):
        assert torch.equal(getattr(one, name), getattr(other, name)), f"{name} of {one.name}"


# What a sample depends on.


@pytest.mark.parametrize("kind", ["sde", "cps", "dance_sde"])
@pytest.mark.parametrize(("per_step", "max_rows"), [(1, 96), (5, 96), (24, 3)], ids=["1", "5", "few rows"])
def test_staggered_arrivals_equal_the_whole_batch(kind: str, per_step: int, max_rows: int) -> None:
    asked = requests(6, 4, kind=kind)
    whole = run(engine_of(Field()), asked, per_step=len(asked))
    staggered = run(engine_of(Field(), max_rows), asked, per_step=per_step)
    assert whole.keys() == staggered.keys() == {request.name for request in asked}
    for name, sample in whole.items():
        require_equal(staggered[name], sample)


def test_a_seed_decides_the_sample() -> None:
    first, second = requests(1, 2)
    same, other = replace(first, name="same"), second
    done = run(engine_of(Field()), [first, same, other], per_step=3)
    assert torch.equal(done[first.name].latent, done["same"].latent)
    assert not torch.equal(done[first.name].latent, done[other.name].latent)


def test_rows_of_different_kinds_and_lengths_share_a_forward() -> None:
    sde, cps = requests(1, 1)[0], replace(requests(2, 1, kind="cps")[1], name="cps")
    short = replace(sde, name="short", sampling=Sampling(schedule=schedule(3), shape=SHAPE))
    alone = {one.name: run(engine_of(Field()), [one], per_step=1)[one.name] for one in (sde, cps, short)}
    field = Field()
    together = run(engine_of(field), [sde, cps, short], per_step=3)
    assert field.rows == [8] * STEPS
    for name, sample in alone.items():
        require_equal(together[name], sample)


def test_rows_of_different_shapes_are_separate_forwards() -> None:
    rows: list[tuple[int, ...]] = []

    def field(x: torch.Tensor, sigma: torch.Tensor, conditions: Any) -> torch.Tensor:
        rows.append(tuple(x.shape[1:]))
        return x

    small, large = (
        SampleRequest(
            name=str(n), conditions={}, seed=n, sampling=Sampling(schedule=schedule(1), shape=(n, n))
        )
        for n in (2, 4)
    )
    done = run(engine_of(field), [small, large], per_step=2)
    assert sorted(rows) == [(2, 2), (4, 4)]
    assert done["4"].latent.shape == (4, 4)


# What a sample is.


def test_the_window_is_recorded_and_the_rest_follows_the_ode() -> None:
    request, field = requests(1, 1)[0], Field()
    window = request.sampling.window
    assert window is not None
    sample = run(engine_of(field), [request], per_step=1)[request.name]
    assert sample.steps == tuple(window.steps)
    assert sample.latents.shape == (window.size + 1, *SHAPE) and sample.log_probs.shape == (window.size,)
    with torch.no_grad():
        again = evaluate(
            field,
            latents=sample.latents[None],
            steps=torch.tensor([sample.steps]),
            conditions={name: one[None] for name, one in request.conditions.items()},
            schedule=schedule(),
            kind="sde",
            noise_level=0.7,
        )
        assert torch.equal(again.log_probs[0], sample.log_probs), "the trainer finds the sampler's log-probs"
        x, conditions = sample.latents[-1], request.conditions["prompt"][None]
        for index in range(window.start + window.size, STEPS):
            sigma, after = schedule().sigmas[index : index + 2].float()
            velocity = field(x[None], sigma[None], {"prompt": conditions})[0]
            x = x + (after - sigma) * velocity
    torch.testing.assert_close(sample.latent, x, rtol=1e-5, atol=1e-6)


def test_without_a_window_every_step_is_the_ode() -> None:
    request = requests(1, 1)[0]
    plain = replace(request, sampling=Sampling(schedule=schedule(), shape=SHAPE))
    sample = run(engine_of(Field()), [plain], per_step=1)[plain.name]
    assert (sample.steps, sample.spans, len(sample.latents), len(sample.log_probs)) == ((), (), 0, 0)
    assert torch.isfinite(sample.latent).all()


# Weights.


class Weights:
    """A field whose weights a load replaces in place."""

    def __init__(self) -> None:
        self.versions = {0: Field(0), 1: Field(1), 2: Field(2)}
        self.served = Field(0)

    def commit(self, version: int) -> None:
        self.served.load_state_dict(self.versions[version].state_dict())


def test_a_step_can_be_computed_again_from_the_version_that_made_it_and_from_no_other() -> None:
    weights, asked = Weights(), requests(6, 4)
    engine, waiting, done = engine_of(weights.served), list(asked), dict[str, FinishedSample]()
    number = 0
    while waiting or engine.busy:
        for request in waiting[:3]:
            engine.submit(request)
        waiting = waiting[3:]
        if number in (3, 6):
            version = number // 3
            engine.load(version, lambda version=version: weights.commit(version))  # type: ignore[misc]
        done |= {sample.name: sample for sample in engine.step()}
        number += 1

    mixed = [sample for sample in done.values() if len(sample.spans) > 1]
    assert mixed and {version for sample in done.values() for version, _ in sample.spans} == {0, 1, 2}
    by_name = {request.name: request for request in asked}
    for sample in done.values():
        made_by = [max(v for v, start in sample.spans if start <= k) for k in range(len(sample.steps))]
        for version, field in weights.versions.items():
            with torch.no_grad():
                again = evaluate(
                    field,
                    latents=sample.latents[None],
                    steps=torch.tensor([sample.steps]),
                    conditions={"prompt": by_name[sample.name].conditions["prompt"][None]},
                    schedule=schedule(),
                    kind="sde",
                    noise_level=0.7,
                ).log_probs[0]
            own = torch.tensor([one == version for one in made_by])
            assert torch.equal(again[own], sample.log_probs[own])
            assert bool((again[~own] != sample.log_probs[~own]).all())


def test_a_span_begins_at_the_first_step_of_a_version() -> None:
    request = replace(
        requests(1, 1)[0],
        sampling=Sampling(
            schedule=schedule(), shape=SHAPE, kind="sde", noise_level=0.7, window=SdeWindow(1, 3)
        ),
    )
    engine = engine_of(Field(), version=4)
    engine.submit(request)
    engine.step()
    engine.load(5, lambda: None)
    engine.step()
    engine.load(6, lambda: None)
    engine.load(7, lambda: None)
    engine.step()
    assert engine.progress() == {request.name: 2}
    done = run(engine, [], per_step=1)[request.name]
    assert done.spans == ((5, 0), (7, 1)), "version 4 made an ODE step only, 6 none"


def test_no_step_is_made_without_weights() -> None:
    engine = StepEngine(Field(), max_rows=8)
    engine.submit(requests(1, 1)[0])
    with pytest.raises(WeightSyncError, match="load a version before the first step"):
        engine.step()


def test_after_a_failed_load_no_step_is_made_until_one_succeeds() -> None:
    def fail() -> None:
        raise WeightSyncError("half a version")

    engine = engine_of(Field())
    engine.submit(requests(1, 1)[0])
    engine.step()
    with pytest.raises(WeightSyncError, match="half a version"):
        engine.load(1, fail)
    with pytest.raises(WeightSyncError, match="no weights are served"):
        engine.step()
    assert engine.load(2, lambda: "report") == "report"
    assert len(run(engine, [], per_step=1)) == 1, "the sample continues"


# Requests.


def test_no_more_rows_are_open_than_allowed_and_the_first_come_first() -> None:
    engine = engine_of(Field(), max_rows=2)
    for request in requests(1, 5):
        engine.submit(request)
    order = []
    while engine.busy:
        order += [sample.name for sample in engine.step()]
        assert sum(steps > 0 for steps in engine.progress().values()) <= 2
    assert order == [f"0/{index}" for index in range(5)]


def test_a_sample_can_be_withdrawn_while_it_waits_and_while_it_is_drawn() -> None:
    asked = requests(1, 3)
    alone = run(engine_of(Field()), asked[1:2], per_step=1)
    engine = engine_of(Field(), max_rows=2)
    for request in asked:
        engine.submit(request)
    engine.step()
    assert engine.withdraw("0/0") and engine.withdraw("0/2") and not engine.withdraw("0/0")
    done = run(engine, [], per_step=1)
    assert done.keys() == {"0/1"}
    require_equal(done["0/1"], alone["0/1"])


def test_a_name_is_used_once_at_a_time() -> None:
    engine, request = engine_of(Field()), requests(1, 1)[0]
    engine.submit(request)
    with pytest.raises(ConfigError, match="a sample named 0/0 is being drawn already"):
        engine.submit(request)
    engine.withdraw(request.name)
    engine.submit(request)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"kind": "sde", "noise_level": 0.0, "window": SdeWindow(0, 2)}, "SDE steps need noise"),
        ({"kind": "ode", "noise_level": 0.7, "window": SdeWindow(0, 2)}, "SDE steps need noise"),
        (
            {"kind": "sde", "noise_level": 0.7, "window": SdeWindow(4, 2)},
            "must be before the last of 6 steps",
        ),
        (
            {"kind": "sde", "noise_level": 0.7, "window": SdeWindow(0, 0)},
            "must be before the last of 6 steps",
        ),
        ({"kind": "sde", "noise_level": -1.0}, "noise_level must be finite"),
    ],
)
def test_sampling_that_cannot_be_trained_is_refused(how: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Sampling(schedule=schedule(), shape=SHAPE, **how)


def test_an_engine_has_room() -> None:
    with pytest.raises(ConfigError, match="max_rows >= 1, got 0"):
        StepEngine(Field(), max_rows=0)


# The same with a transformer of diffusers.


@pytest.mark.real_engine
def test_a_transformer_keeps_its_bits_when_samples_arrive_one_by_one_and_weights_change() -> None:
    pytest.importorskip("diffusers")
    versions = {0: tiny_sd3(0), 1: tiny_sd3(1)}
    served = copy.deepcopy(versions[0])
    family = StableDiffusion3()

    def field(model: Any) -> VelocityField:
        return lambda x, sigma, conditions: family.velocity(model, x, sigma, conditions)

    asked = [
        replace(
            request,
            conditions=tiny_conditions(int(request.name[0])),
            sampling=replace(request.sampling, shape=(4, 8, 8)),
        )
        for request in requests(5, 4)
    ]
    whole = run(engine_of(field(served)), asked, per_step=len(asked))
    staggered = run(engine_of(field(served)), asked, per_step=1)
    for name, sample in whole.items():
        require_equal(staggered[name], sample)

    engine, done, waiting, number = engine_of(field(served)), [], list(asked), 0
    while waiting or engine.busy:
        for request in waiting[:2]:
            engine.submit(request)
        waiting = waiting[2:]
        if number == 5:
            engine.load(1, lambda: served.load_state_dict(versions[1].state_dict()))
        done += engine.step()
        number += 1
    by_name = {request.name: request for request in asked}
    assert any(len(sample.spans) == 2 for sample in done)
    for sample in done:
        made_by = torch.tensor(
            [max(v for v, start in sample.spans if start <= k) for k in range(len(sample.steps))]
        )
        for version, model in versions.items():
            with torch.no_grad():
                again = evaluate(
                    field(model),
                    latents=sample.latents[None],
                    steps=torch.tensor([sample.steps]),
                    conditions={k: v[None] for k, v in by_name[sample.name].conditions.items()},
                    schedule=schedule(),
                    kind="sde",
                    noise_level=0.7,
                ).log_probs[0]
            own = made_by == version
            assert torch.equal(again[own], sample.log_probs[own])
            assert bool((again[~own] != sample.log_probs[~own]).all())
