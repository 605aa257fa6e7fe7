# SPDX-License-Identifier: Apache-2.0
"""Train a transformer of diffusers with verl's FSDP2 engine on real ranks, and publish what it trained.

Argument: a folder, which gets a file of tensors for each cell. Prints what each rank printed, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.utils.losses import ppo_loss

from recipe.async_pipeline.diffusion.families import StableDiffusion3, stacked
from recipe.async_pipeline.diffusion.model_folder import ModelFolder
from recipe.async_pipeline.diffusion.policy import evaluate
from recipe.async_pipeline.diffusion.seeds import seed_of
from recipe.async_pipeline.diffusion.step_engine import FinishedSample, SampleRequest, Sampling, StepEngine
from recipe.async_pipeline.diffusion.transformer_adapter import TransformerAdapter
from recipe.async_pipeline.diffusion.windows import RandomWindow
from recipe.async_pipeline.verl_bridge.workers.diffusion import diffusion_engine  # noqa: F401  registers it
from recipe.async_pipeline.verl_bridge.workers.diffusion.diffusion_model import (
    CONDITION,
    Denoising,
    DiffusionModelConfig,
)
from recipe.async_pipeline.verl_bridge.workers.fsdp_shards import TrainingRanks
from recipe.async_pipeline.verl_bridge.workers.shards import held_by
from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from tests import HANG_S
from tests.fakes.adapter_contract import prove_first
from tests.fakes.forked_ranks import fork_ranks
from tests.fakes.tiny_flow import tiny_conditions, tiny_folder, tiny_sd3

SAMPLES, WINDOW, STEPS, SIDE, NOISE = 16, 3, 6, 16, 0.7
PROMPT = 4
"""Tokens of a prompt: more than one, so that the layout of prompt and response counts."""
RATE, CLIP = 1e-3, 1e-3
CELLS = {"full@1": (0, 1), "full@2": (0, 2), "lora@1": (4, 1), "lora@2": (4, 2)}


def velocity_of(model: Any) -> Any:
    return partial(StableDiffusion3().velocity, model)


def sampled(folder: ModelFolder) -> dict[str, Any]:
    """Samples of four groups, as the rollout draws them."""
    engine = StepEngine(velocity_of(tiny_sd3(0)), max_rows=SAMPLES)
    engine.load(0, lambda: None)
    windows = RandomWindow(size=WINDOW, first=0, end=5, num_steps=STEPS)
    for index in range(SAMPLES):
        group = index // 4
        engine.submit(
            SampleRequest(
                name=str(index),
                conditions=tiny_conditions(group),
                seed=seed_of(index),
                sampling=Sampling(
                    schedule=folder.schedule(STEPS, SIDE, SIDE),
                    shape=folder.latent_shape(SIDE, SIDE),
                    kind="sde",
                    noise_level=NOISE,
                    window=windows.of(group, 0),
                ),
            )
        )
    done: dict[int, FinishedSample] = {}
    while engine.busy:
        done |= {int(sample.name): sample for sample in engine.step()}
    rows = [done[index] for index in range(SAMPLES)]
    return {
        "latents": torch.stack([row.latents for row in rows]),
        "steps": torch.tensor([row.steps for row in rows]),
        "log_probs": torch.stack([row.log_probs for row in rows]),
        "conditions": stacked([tiny_conditions(index // 4) for index in range(SAMPLES)]),
        "advantages": torch.randn(SAMPLES, generator=torch.Generator().manual_seed(3)),
    }


def batch_of(data: dict[str, Any], rows: slice) -> Any:
    """The rows of one rank, in verl's columns."""

    def nested(values: Any) -> torch.Tensor:
        return torch.nested.as_nested_tensor(list(values), layout=torch.jagged)

    count = len(data["latents"][rows])
    ones = [torch.ones(WINDOW)] * count
    batch = TensorDict(
        {
            "prompts": nested([torch.arange(1, PROMPT + 1)] * count),
            "responses": nested(data["steps"][rows]),
            "response_mask": nested(ones),
            "loss_mask": nested(ones),
            "old_log_probs": nested(data["log_probs"][rows]),
            "advantages": nested(a.expand(WINDOW).clone() for a in data["advantages"][rows]),
            # Nested although the rows have one shape, as the sample store returns all columns.
            "latents": nested(data["latents"][rows]),
            **{f"{CONDITION}{k}": nested(v[rows]) for k, v in data["conditions"].items()},
        },
        batch_size=count,
    )
    tu.assign_non_tensor(batch, use_dynamic_bsz=False, micro_batch_size_per_gpu=8, global_batch_size=SAMPLES)
    return batch


def make_engine(path: Path, rank_of_adapter: int) -> Any:
    model = DiffusionModelConfig(
        path=str(path),
        lora_rank=rank_of_adapter,
        lora_alpha=8,
        denoising=Denoising(
            num_inference_steps=STEPS, height=SIDE, width=SIDE, sde_type="sde", noise_level=NOISE
        ),
    )
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = EngineRegistry.new(
        model_type="diffusion_model",
        backend="fsdp2",
        model_config=model,
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            fsdp_size=-1,
            model_dtype="fp32",
            mixed_precision=precision,
            use_torch_compile=False,
            use_dynamic_bsz=False,
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=RATE,
            weight_decay=0.0,
            clip_grad=1.0,
            total_training_steps=10,
            lr_warmup_steps=0,
            betas=(0.9, 0.999),
        ),
        checkpoint_config=CheckpointConfig(),
    )
    torch.manual_seed(0)  # of the adapters' first weights
    engine.initialize()
    if rank_of_adapter:
        with torch.no_grad():
            for name, parameter in engine.module.named_parameters():
                if ".lora_B." in name:  # 0 at first, so that nothing would depend on the other half
                    parameter.add_(0.01)
    return engine


def log_probs_of(engine: Any, batch: Any) -> torch.Tensor:
    with engine.eval_mode():
        found = engine.infer_batch(batch, loss_function=None)["model_output"]["log_probs"]
    rows = found.unbind() if found.is_nested else found
    return torch.stack([row[PROMPT - 1 : PROMPT - 1 + WINDOW] for row in rows])


def whole(engine: Any) -> dict[str, torch.Tensor]:
    """All weights, whole. A collective."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in engine.module.state_dict().items()
    }


def run_rank(rank: int, *, cell: str, folder: Path) -> None:
    """Run one rank: log-probs, one optimizer step, log-probs again, and the delivery of what was trained."""
    torch.set_num_threads(1)
    rank_of_adapter, count = CELLS[cell]
    dist.init_process_group("gloo", init_method=f"file://{folder / cell}", rank=rank, world_size=count)
    path = folder / "model"
    data, share = sampled(ModelFolder(path)), SAMPLES // count
    rows = slice(rank * share, (rank + 1) * share)
    engine = make_engine(path, rank_of_adapter)

    before = log_probs_of(engine, batch_of(data, rows))
    if rank_of_adapter:
        data["log_probs"][rows] = before
    loss: Callable[..., Any] = partial(ppo_loss, actor_config())
    with engine.train_mode():
        trained = engine.train_batch(batch_of(data, rows), loss_function=loss)
    after = log_probs_of(engine, batch_of(data, rows))

    # Delivery: the ranks' shares form one version, which a rollout's transformer loads and proves.
    ranks = TrainingRanks("this host")
    writer = ArenaWriter(1 << 14, 1000, torch.float32, ranks)
    held = held_by(engine)
    assert held is not None and (held.adapter is not None) == bool(rank_of_adapter)
    ticket = ranks.share(writer.gather_parts(1, held.parts, held.adapter))
    assert ticket is not None
    manifest = await_manifest(ticket, HANG_S)
    served = tiny_sd3(0 if rank_of_adapter else 9)
    proved = prove_first([TransformerAdapter(served, torch.device("cpu"))], manifest)
    with torch.no_grad():
        of_rollout = evaluate(
            velocity_of(served),
            latents=data["latents"][rows],
            steps=data["steps"][rows],
            conditions={name: value[rows] for name, value in data["conditions"].items()},
            schedule=engine.model_config.schedule,
            kind="sde",
            noise_level=NOISE,
        ).log_probs

    weights = whole(engine)
    checkpoint = folder / f"{cell}-checkpoint"
    engine.save_checkpoint(str(checkpoint), global_step=1)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    engine.load_checkpoint(str(checkpoint), del_local_after_load=False)
    restored = whole(engine)
    torch.save(
        {
            "sampled": data["log_probs"][rows],
            "before": before,
            "after": after,
            "of_rollout": of_rollout,
            "published": len(manifest.tensors),
            "proved": proved,
            "grad_norm": float(trained["metrics"]["grad_norm"]),
            "weights": weights,
            "restored": restored.keys() == weights.keys()
            and all(torch.equal(restored[name], weights[name]) for name in weights),
            "described": (checkpoint / "huggingface" / "config.json").is_file(),
        },
        folder / f"{cell}-{rank}.pt",
    )
    ranks.barrier()
    writer.close()
    dist.destroy_process_group()


def actor_config() -> Any:
    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=4,
        ppo_mini_batch_size=SAMPLES // 4,
        ppo_micro_batch_size_per_gpu=8,
        clip_ratio=CLIP,
        clip_ratio_low=CLIP,
        clip_ratio_high=CLIP,
    )


def by_hand(folder: Path) -> None:
    """The step of `full@1` in plain torch, as Flow-GRPO writes it."""
    torch.set_num_threads(1)
    model_folder = ModelFolder(folder / "model")
    data, model = sampled(model_folder), tiny_sd3(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for rows in (slice(0, 8), slice(8, 16)):
        found = evaluate(
            velocity_of(model),
            latents=data["latents"][rows],
            steps=data["steps"][rows],
            conditions={name: value[rows] for name, value in data["conditions"].items()},
            schedule=model_folder.schedule(STEPS, SIDE, SIDE),
            kind="sde",
            noise_level=NOISE,
        ).log_probs
        ratio = (found - data["log_probs"][rows]).exp()
        advantages = data["advantages"][rows, None]
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
        (loss.sum() / (SAMPLES * WINDOW)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    torch.save({"grad_norm": float(norm), "weights": model.state_dict()}, folder / "by_hand.pt")


if __name__ == "__main__":
    meet = Path(sys.argv[1])
    tiny_folder(meet / "model")
    printed = {"by_hand": fork_ranks(lambda _: by_hand(meet), range(1))}
    for name, (_, ranks) in CELLS.items():
        printed[name] = fork_ranks(partial(run_rank, cell=name, folder=meet), range(ranks))
    sys.stdout.write(json.dumps(printed))
