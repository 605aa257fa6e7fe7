# SPDX-License-Identifier: Apache-2.0
"""Families are sampled as diffusers samples them, and a row's velocity does not depend on its neighbours."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from recipe.async_pipeline.diffusion.families import (
    EMPTY,
    FAMILIES,
    Family,
    Flux,
    StableDiffusion3,
    dynamic_shift,
    family_of,
    packed,
    patch_ids,
    stacked,
    unpacked,
)
from recipe.async_pipeline.diffusion.sde import velocities
from recipe.async_pipeline.errors import ConfigError
from tests.fakes.tiny_flow import tiny_conditions, tiny_flux, tiny_sd3


def test_a_pipeline_has_its_family() -> None:
    assert isinstance(family_of("StableDiffusion3Pipeline"), StableDiffusion3)
    assert isinstance(family_of("FluxPipeline"), Flux)
    with pytest.raises(
        ConfigError, match="holds a WanPipeline; supported are StableDiffusion3Pipeline, Flux"
    ):
        family_of("WanPipeline")


def test_packing_keeps_every_element() -> None:
    x = torch.randn(3, 5, 4, 6)
    assert packed(x).shape == (3, 6, 20)
    assert torch.equal(unpacked(packed(x), 4, 6), x)


def test_a_patch_is_two_by_two() -> None:
    x = torch.arange(2 * 4 * 4.0).view(1, 2, 4, 4)
    assert packed(x)[0, 1].tolist() == [2, 3, 6, 7, 18, 19, 22, 23]


def test_patches_are_numbered_by_row_and_column() -> None:
    assert patch_ids(2, 3).tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 1, 2]]


def test_the_shift_grows_with_the_image() -> None:
    assert dynamic_shift({}, 256) == pytest.approx(1.6487, abs=1e-4)
    assert dynamic_shift({}, 4096) == pytest.approx(3.1582, abs=1e-4)
    assert dynamic_shift({"base_shift": 0.0, "max_shift": 1.0, "max_image_seq_len": 512}, 384) == (
        pytest.approx(1.6487, abs=1e-4)
    )


def test_conditions_of_several_rows_form_a_batch() -> None:
    both = stacked([{"a": torch.ones(2)}, {"a": torch.zeros(2)}])
    assert both["a"].tolist() == [[1, 1], [0, 0]]


# With diffusers.


def scheduled(config: dict[str, Any], num_steps: int, **settings: Any) -> list[float]:
    """The levels of the library's scheduler."""
    schedulers = pytest.importorskip("diffusers.schedulers")
    scheduler = schedulers.FlowMatchEulerDiscreteScheduler(**config)
    scheduler.set_timesteps(num_steps, **settings)
    levels: list[float] = scheduler.sigmas.tolist()
    return levels


@pytest.mark.real_engine
@pytest.mark.parametrize("num_steps", [6, 28])
@pytest.mark.parametrize("config", [{"shift": 3.0}, {"shift": 1.0}], ids=json.dumps)
def test_stable_diffusion_is_sampled_by_its_schedule(config: dict[str, Any], num_steps: int) -> None:
    levels = StableDiffusion3().schedule(num_steps, config, 1024).sigmas
    assert levels.tolist() == pytest.approx(scheduled(config, num_steps), abs=1e-6)


@pytest.mark.real_engine
def test_stable_diffusion_may_shift_by_the_size_of_the_image() -> None:
    from math import log

    config = {"use_dynamic_shifting": True}
    levels = StableDiffusion3().schedule(10, config, 1024).sigmas
    wanted = scheduled(config, 10, mu=log(dynamic_shift(config, 1024)))
    assert levels.tolist() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.real_engine
@pytest.mark.parametrize("tokens", [64, 1024, 4096])
def test_flux_is_sampled_by_its_schedule(tokens: int) -> None:
    pipelines = pytest.importorskip("diffusers.pipelines.flux.pipeline_flux")
    times = torch.linspace(1.0, 1 / 8, 8).tolist()
    mu = pipelines.calculate_shift(tokens)
    wanted = scheduled({"use_dynamic_shifting": True}, 8, sigmas=times, mu=mu)
    levels = Flux().schedule(8, {"use_dynamic_shifting": True}, tokens).sigmas
    assert levels.tolist() == pytest.approx(wanted, abs=1e-6)
    plain = Flux().schedule(4, {"shift": 1.0}, tokens).sigmas
    assert plain.tolist() == pytest.approx([1, 0.75, 0.5, 0.25, 0])


@pytest.mark.real_engine
def test_flux_packs_latents_as_the_library_does() -> None:
    pipelines = pytest.importorskip("diffusers.pipelines.flux.pipeline_flux")
    x, pipeline = torch.randn(2, 4, 8, 6), pipelines.FluxPipeline
    assert torch.equal(packed(x), pipeline._pack_latents(x, 2, 4, 8, 6))
    ids = pipeline._prepare_latent_image_ids(2, 4, 3, torch.device("cpu"), torch.float32)
    assert torch.equal(patch_ids(4, 3), ids)


MODELS: dict[str, tuple[Family, Callable[[], Any]]] = {
    "sd3": (StableDiffusion3(), tiny_sd3),
    "flux": (Flux(), tiny_flux),
}


@pytest.mark.real_engine
@pytest.mark.parametrize("name", MODELS)
def test_each_row_has_its_own_noise_level_and_conditions(name: str) -> None:
    pytest.importorskip("diffusers")
    family, make = MODELS[name]
    model = make()
    assert type(model).__name__ == family.transformer
    assert {type(block).__name__ for block in model.modules()} >= set(family.blocks)
    x, sigma = torch.randn(11, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.rand(11)
    conditions = stacked([tiny_conditions(row) for row in range(11)])

    def field(x: torch.Tensor, sigma: torch.Tensor, given: Any) -> torch.Tensor:
        return family.velocity(model, x, sigma, given)

    with torch.no_grad():
        together = velocities(field, x, sigma, conditions)
        assert together.shape == x.shape and together.dtype == torch.float32
        for row in range(11):
            of_row = {key: value[row : row + 1] for key, value in conditions.items()}
            alone = velocities(field, x[row : row + 1], sigma[row : row + 1], of_row)
            assert torch.equal(alone, together[row : row + 1])
        later = velocities(field, x, sigma * 0.5, conditions)
    assert (later - together).abs().amax(dim=(1, 2, 3)).min() > 0, "the level of every row counts"


@pytest.mark.real_engine
def test_stable_diffusion_is_called_with_times_up_to_a_thousand() -> None:
    pytest.importorskip("diffusers")
    model, x, sigma = tiny_sd3(), torch.randn(8, 4, 8, 8), torch.linspace(0.1, 1, 8)
    given = stacked([tiny_conditions(row) for row in range(8)])
    with torch.no_grad():
        wanted = model(hidden_states=x, timestep=sigma * 1000, return_dict=False, **given)[0]
        assert torch.equal(StableDiffusion3().velocity(model, x, sigma, given), wanted)


@pytest.mark.real_engine
def test_a_distilled_flux_gets_its_guidance_as_an_input() -> None:
    pytest.importorskip("diffusers")
    given, x, model = stacked([tiny_conditions()]), torch.randn(1, 4, 8, 8), tiny_flux(guided=True)
    with torch.no_grad():
        usual, same, more = (
            Flux().velocity(model, x, torch.tensor([0.5]), given, scale) for scale in (None, 3.5, 7.0)
        )
    assert usual.shape == x.shape
    assert torch.equal(usual, same) and not torch.equal(usual, more)


def test_a_flux_without_an_input_for_it_has_no_guidance() -> None:
    family = Flux()
    family.check_guidance(None, {})
    family.check_guidance(2.0, {"guidance_embeds": True})
    with pytest.raises(ConfigError, match="guidance_scale must be left out for a FLUX without"):
        family.check_guidance(2.0, {"guidance_embeds": False})
    assert family.conditions(2.0) == family.conditions(None)


@pytest.mark.real_engine
def test_stable_diffusion_is_guided_away_from_the_empty_prompt() -> None:
    pytest.importorskip("diffusers")
    family, model, x = StableDiffusion3(), tiny_sd3(), torch.randn(8, 4, 8, 8)
    sigma = torch.linspace(0.1, 1, 8)
    given, empty = (stacked([tiny_conditions(row) for row in range(at, at + 8)]) for at in (0, 8))
    both = given | {EMPTY + name: one for name, one in empty.items()}
    assert family.conditions(4.5) == tuple(both) and family.conditions(1.0) == tuple(given)
    with torch.no_grad():
        plain, without = (family.velocity(model, x, sigma, one) for one in (given, empty))
        guided = family.velocity(model, x, sigma, both, 4.5)
        assert torch.equal(family.velocity(model, x, sigma, given, 1.0), plain)
    torch.testing.assert_close(guided, without + 4.5 * (plain - without), rtol=0, atol=1e-5)


@pytest.mark.real_engine
def test_a_guided_row_is_the_same_in_any_batch() -> None:
    pytest.importorskip("diffusers")
    model, x, sigma = tiny_sd3(), torch.randn(11, 4, 8, 8), torch.rand(11)
    rows = [
        tiny_conditions(row) | {EMPTY + name: one for name, one in tiny_conditions(99).items()}
        for row in range(11)
    ]

    def field(x: torch.Tensor, sigma: torch.Tensor, given: Any) -> torch.Tensor:
        return StableDiffusion3().velocity(model, x, sigma, given, 4.5)

    with torch.no_grad():
        together = velocities(field, x, sigma, stacked(rows))
        for row in range(11):
            at = slice(row, row + 1)
            assert torch.equal(velocities(field, x[at], sigma[at], stacked(rows[at])), together[at])


@pytest.mark.real_engine
@pytest.mark.parametrize("name", MODELS)
def test_adapters_find_their_layers(name: str) -> None:
    pytest.importorskip("diffusers")
    family, make = MODELS[name]
    names = {module for module, _ in make().named_modules()}
    for target in family.lora_targets:
        assert any(module.endswith(f".{target}") for module in names), target


def test_all_families_are_listed_by_their_pipeline() -> None:
    assert [family.pipeline for family in FAMILIES.values()] == list(FAMILIES)
