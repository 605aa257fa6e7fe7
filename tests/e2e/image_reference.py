# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO of the image task as a synchronous loop in one process: no Ray, no verl, no pipeline.

Each step: draw the images of all its prompts, score them, one optimizer step. What a job of the pipeline
computes with `on_policy` must be this, bit for bit. The model is wrapped by FSDP2 as there, because its hooks
decide in which order autograd adds the gradients of a tensor that several blocks use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recipe.async_pipeline.diffusion.model_folder import FrozenParts, ModelFolder
from recipe.async_pipeline.diffusion.sde import evaluate
from recipe.async_pipeline.diffusion.step_engine import FinishedSample, SampleRequest, Sampling, StepEngine
from recipe.async_pipeline.diffusion.windows import RandomWindow, seed_of
from recipe.async_pipeline.lab.tasks.image_task.image_model import MAX_TOKENS
from recipe.async_pipeline.lab.tasks.image_task.image_reward import compute_score

SIDE, STEPS, NOISE, CLIP, RATE = 16, 10, 0.7, 1e-3, 5e-4
SAMPLES, SEED, GUIDANCE = 8, 1, 2.0
WINDOWS = RandomWindow(size=3, first=0, end=5, num_steps=STEPS)


@dataclass(frozen=True)
class Row:
    """A prompt of the training data."""

    index: int
    prompt: str
    answer: str


@dataclass
class Result:
    """What the loop has computed."""

    model: Any
    guided: bool
    rewards: list[float] = field(default_factory=list)
    """Mean of each step."""
    grad_norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the model at the end."""


def batches(task: Path, size: int, number: int) -> list[list[Row]]:
    """Return the first batches of the training data, in its order."""
    from pyarrow.parquet import read_table

    rows = [
        Row(row["extra_info"]["index"], row["prompt"][0]["content"], row["reward_model"]["ground_truth"])
        for row in read_table(task / "train.parquet").to_pylist()
    ]
    return [rows[size * i : size * (i + 1)] for i in range(number)]


def train(path: Path, batches: Sequence[Sequence[Row]], *, guided: bool) -> Result:
    """Train on batches of prompts, one optimizer step each."""
    import diffusers

    folder = ModelFolder(path)
    model = diffusers.SD3Transformer2DModel.from_pretrained(folder.transformer, torch_dtype=torch.float32)
    frozen = FrozenParts.load(folder, max_sequence_length=MAX_TOKENS)
    with _one_rank():
        mesh = init_device_mesh("cpu", (1,))
        for part in (*model.transformer_blocks, model):
            fully_shard(part, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999), weight_decay=0.0)
        result = Result(model, guided)
        for number, batch in enumerate(batches, 1):
            _step(number, batch, folder, frozen, optimizer, result)
        for name, weight in model.state_dict().items():
            result.weights[name] = weight.to_local() if hasattr(weight, "to_local") else weight
    return result


@contextmanager
def _one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _step(
    number: int,
    batch: Sequence[Row],
    folder: ModelFolder,
    frozen: FrozenParts,
    optimizer: torch.optim.Optimizer,
    result: Result,
) -> None:
    model = result.model.eval()
    velocity = partial(folder.family.velocity, model, scale=GUIDANCE if result.guided else None)
    conditions = frozen.encode([row.prompt for row in batch], with_empty=result.guided)
    samples = _drawn(number, batch, folder, velocity, conditions)
    pictures = frozen.decode(torch.stack([one.latent for one in samples]))
    answers = [row.answer for row in batch for _ in range(SAMPLES)]
    pairs = zip(pictures, answers, strict=True)
    scores = torch.tensor([compute_score("", picture, answer)["score"] for picture, answer in pairs])
    result.rewards.append(float(scores.mean()))

    groups = scores.view(-1, SAMPLES)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)
    old = torch.stack([one.log_probs for one in samples])
    model.train()
    found = evaluate(
        velocity,
        latents=torch.stack([one.latents for one in samples]),
        steps=torch.tensor([one.steps for one in samples]),
        conditions={
            name: torch.stack([one[name] for one in conditions for _ in range(SAMPLES)])
            for name in conditions[0]
        },
        schedule=folder.schedule(STEPS, SIDE, SIDE),
        kind="sde",
        noise_level=NOISE,
    ).log_probs
    ratio = (found - old).exp()
    assert torch.equal(ratio, torch.ones_like(ratio)), "the trainer finds the sampler's log-probs"
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    optimizer.zero_grad()
    (loss.sum() / loss.numel()).backward()
    result.grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
    optimizer.step()


def _drawn(
    number: int, batch: Sequence[Row], folder: ModelFolder, velocity: Any, conditions: Sequence[Any]
) -> list[FinishedSample]:
    """Return the samples of a step, prompt by prompt."""
    engine = StepEngine(velocity, max_rows=len(batch) * SAMPLES)
    engine.load(number - 1, lambda: None)
    for row, given in zip(batch, conditions, strict=True):
        place = (SEED, number, row.index)
        sampling = Sampling(
            schedule=folder.schedule(STEPS, SIDE, SIDE),
            shape=folder.latent_shape(SIDE, SIDE),
            kind="sde",
            noise_level=NOISE,
            window=WINDOWS.of(seed_of("window", *place), number),
        )
        for session in range(SAMPLES):
            engine.submit(
                SampleRequest(
                    name=f"{row.index}/{session}",
                    conditions=given,
                    seed=seed_of("train", *place, session),
                    sampling=sampling,
                )
            )
    done: dict[str, FinishedSample] = {}
    while engine.busy:
        done |= {one.name: one for one in engine.step()}
    return [done[f"{row.index}/{session}"] for row in batch for session in range(SAMPLES)]
