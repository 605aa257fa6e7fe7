# SPDX-License-Identifier: Apache-2.0
"""Supervised warm-up of the image pipeline: the VAE learns the pictures, then the transformer to draw them.

The transformer is shown pictures whose colour and quarter are often not the ones of the prompt, so that it
draws clean squares and means the prompt only a little: RL has to learn the rest. The text towers keep their
random weights, which tell the prompts apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from recipe.async_pipeline.errors import ConfigError, WarmupFailed
from recipe.async_pipeline.lab.tasks.image_task.image import SCENES, SIDE, ImageTask, Scene
from recipe.async_pipeline.lab.tasks.image_task.image_reward import compute_score

if TYPE_CHECKING:
    import torch

    from recipe.async_pipeline.diffusion.model_folder import FrozenParts, ModelFolder

SQUARE = 6
"""Height and width of a square, in pixels; it is anywhere in its quarter."""


@dataclass(frozen=True, kw_only=True)
class ImageWarmupSpec:
    """Length and learning rates of the supervised training."""

    vae_steps: int = 300
    """Optimizer steps of the VAE."""

    vae_learning_rate: float = 3e-3
    """Learning rate of the VAE."""

    max_vae_error: float = 0.03
    """Largest mean squared error of decoded pictures, with values in [-1, 1]."""

    flow_steps: int = 1000
    """Optimizer steps of the transformer."""

    flow_learning_rate: float = 2e-3
    """Its highest learning rate, in one cycle."""

    batch_size: int = 96
    """Pictures per optimizer step."""

    num_sampling_steps: int = 10
    """Denoising steps of the samples that measure the result."""

    num_checked: int = 20
    """Samples of each prompt in that measurement."""

    min_score: float = 0.45
    """Lowest mean score that RL can start from; chance is 0.29, and 0.54 what was shown."""

    num_threads: int = 1
    """Torch threads. The layers are too small to gain from a second one, and on busy cores it costs time."""

    def __post_init__(self) -> None:
        for name in ("vae_steps", "flow_steps", "batch_size", "num_sampling_steps", "num_checked"):
            if getattr(self, name) < 1:
                raise ConfigError(f"warmup {name} must be >= 1, got {getattr(self, name)}")


def paint(scene: Scene, rng: random.Random) -> torch.Tensor:
    """Return a picture of a scene: float32 (3, height, width) in [-1, 1]."""
    import torch

    picture = torch.full((3, SIDE, SIDE), -1.0)
    row, column = (start + rng.randrange(SIDE // 2 - SQUARE + 1) for start in scene.corner)
    picture[scene.colour, row : row + SQUARE, column : column + SQUARE] = 1.0
    return picture


def train_vae(vae: Any, spec: ImageWarmupSpec, *, seed: int, report: Callable[[str], None]) -> float:
    """Train the VAE in place and set its scale; return the error of decoded pictures.

    Raises WarmupFailed if the error is above `max_vae_error`.
    """
    import torch
    from torch.nn.functional import mse_loss

    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=spec.vae_learning_rate)
    vae.train()
    for _ in range(spec.vae_steps):
        pictures = torch.stack([paint(rng.choice(SCENES), rng) for _ in range(32)])
        found = vae.encode(pictures).latent_dist
        decoded = vae.decode(found.sample(generator=noise)).sample
        loss = mse_loss(decoded, pictures) + 1e-4 * found.kl().mean() / pictures[0].numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    vae.eval()
    pictures = torch.stack([paint(scene, rng) for scene in SCENES for _ in range(8)])
    with torch.no_grad():
        latents = vae.encode(pictures).latent_dist.mode()
        error = float(mse_loss(vae.decode(latents).sample, pictures))
    vae.register_to_config(shift_factor=float(latents.mean()), scaling_factor=1 / float(latents.std()))
    report(f"VAE: mean squared error {error:.4f} after {spec.vae_steps} steps")
    if error > spec.max_vae_error:
        raise WarmupFailed(
            f"the VAE's error is {error:.4f}, more than {spec.max_vae_error}; raise warmup vae_steps"
        )
    return error


def train_flow(
    pipeline: Any,
    conditions: Sequence[dict[str, torch.Tensor]],
    task: ImageTask,
    spec: ImageWarmupSpec,
    *,
    seed: int,
    report: Callable[[str], None],
) -> None:
    """Train a pipeline's transformer in place by flow matching; `conditions` of each scene of `SCENES`."""
    import torch
    from torch.nn.functional import mse_loss

    from recipe.async_pipeline.diffusion.families import family_of, stacked
    from recipe.async_pipeline.diffusion.schedule import shifted

    transformer, vae, family = pipeline.transformer, pipeline.vae, family_of(type(pipeline).__name__)
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=spec.flow_learning_rate, weight_decay=0.0)
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, spec.flow_learning_rate, total_steps=spec.flow_steps
    )
    transformer.train()
    for number in range(1, spec.flow_steps + 1):
        wanted = [rng.randrange(len(SCENES)) for _ in range(spec.batch_size)]
        pictures = torch.stack([paint(task.shown(SCENES[index], rng), rng) for index in wanted])
        with torch.no_grad():
            data = vae.encode(pictures).latent_dist.mode()
            data = (data - vae.config.shift_factor) * vae.config.scaling_factor
        drawn = torch.randn(data.shape, generator=noise)
        # Logit-normal times, shifted: where Stable Diffusion 3 puts its weight.
        sigma = shifted(torch.sigmoid(torch.randn(len(data), generator=noise)), 3.0)
        level = sigma.view(-1, 1, 1, 1)
        batch = stacked([conditions[index] for index in wanted])
        velocity = family.velocity(transformer, (1 - level) * data + level * drawn, sigma, batch)
        loss = mse_loss(velocity, drawn - data)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        cycle.step()
        if number % 250 == 0 or number == spec.flow_steps:
            report(f"transformer: loss {float(loss.detach()):.3f} after {number} of {spec.flow_steps} steps")
    transformer.eval()


def mean_score(
    folder: ModelFolder, transformer: Any, frozen: FrozenParts, spec: ImageWarmupSpec, *, seed: int
) -> float:
    """Return the mean score of samples of every prompt, drawn as in RL."""
    import torch

    from recipe.async_pipeline.diffusion.step_engine import SampleRequest, Sampling, StepEngine
    from recipe.async_pipeline.diffusion.windows import EveryStep, seed_of

    steps = spec.num_sampling_steps
    sampling = Sampling(
        schedule=folder.schedule(steps, SIDE, SIDE),
        shape=folder.latent_shape(SIDE, SIDE),
        kind="sde",
        noise_level=0.7,
        window=EveryStep(num_steps=steps).of(0, 0),
    )
    engine = StepEngine(partial(folder.family.velocity, transformer), max_rows=spec.batch_size)
    engine.load(0, lambda: None)
    asked = {}
    for scene, conditions in zip(SCENES, frozen.encode([scene.prompt for scene in SCENES]), strict=True):
        for index in range(spec.num_checked):
            name = f"{scene.answer} {index}"
            asked[name] = scene
            engine.submit(
                SampleRequest(name=name, conditions=conditions, seed=seed_of(seed, name), sampling=sampling)
            )
    scores = []
    while engine.busy:
        done = engine.step()
        if done:
            pictures = frozen.decode(torch.stack([sample.latent for sample in done]))
            scores += [
                compute_score("", picture, asked[sample.name].answer)["score"]
                for sample, picture in zip(done, pictures, strict=True)
            ]
    return sum(scores) / len(scores)
