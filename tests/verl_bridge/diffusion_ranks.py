# SPDX-License-Identifier: Apache-2.0
"""Train a transformer of diffusers with verl's FSDP2 engine on real ranks, and publish what it trained.

Argument: a folder, which gets a file of tensors for each cell. Prints what each rank printed, as JSON.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tensordict import NonTensorStack, TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig
from verl.workers.engine.base import EngineRegistry

from recipe.async_pipeline.diffusion.families import EMPTY, StableDiffusion3, stacked
from recipe.async_pipeline.diffusion.model_folder import ModelFolder
from recipe.async_pipeline.diffusion.sde import evaluate
from recipe.async_pipeline.diffusion.step_engine import FinishedSample, SampleRequest, Sampling, StepEngine
from recipe.async_pipeline.diffusion.transformer_adapter import TransformerAdapter
from recipe.async_pipeline.diffusion.windows import RandomWindow, seed_of
from recipe.async_pipeline.verl_bridge.rollout.diffusers.fields import CONDITION, HOLDER
from recipe.async_pipeline.verl_bridge.workers.diffusion import diffusion_engine
from recipe.async_pipeline.verl_bridge.workers.diffusion.diffusion_model import (
    Denoising,
    DiffusionModelConfig,
)
from recipe.async_pipeline.verl_bridge.workers.fsdp_shards import TrainingRanks
from recipe.async_pipeline.verl_bridge.workers.loss_registry import ppo_loss_with_scores
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
RATE, CLIP, GUIDANCE, KL_COEF = 1e-3, 1e-3, 4.5, 0.04


class Cell(NamedTuple):
    """How one engine trains."""

    ranks: int
    adapter: int = 0
    guided: bool = False
    """With guidance and a KL divergence."""


CELLS = {
    "full@1": Cell(1),
    "full@2": Cell(2),
    "lora@1": Cell(1, 4),
    "lora@2": Cell(2, 4),
    "guided@1": Cell(1, 4, guided=True),
}


def velocity_of(model: Any, *, guided: bool = False) -> Any:
    return partial(StableDiffusion3().velocity, model, scale=GUIDANCE if guided else None)


def conditions_of(group: int, *, guided: bool) -> dict[str, torch.Tensor]:
    """What the encoders say about the prompt of a group."""
    empty = {EMPTY + name: one for name, one in tiny_conditions(99).items()}
    return {**tiny_conditions(group), **(empty if guided else {})}


def sampled(folder: ModelFolder, *, guided: bool = False) -> dict[str, Any]:
    """Samples of four groups, as the rollout draws them."""
    engine = StepEngine(velocity_of(tiny_sd3(0), guided=guided), max_rows=SAMPLES)
    engine.load(0, lambda: None)
    windows = RandomWindow(size=WINDOW, first=0, end=5, num_steps=STEPS)
    for index in range(SAMPLES):
        group = index // 4
        engine.submit(
            SampleRequest(
                name=str(index),
                conditions=conditions_of(group, guided=guided),
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
        "conditions": stacked([conditions_of(i // 4, guided=guided) for i in range(SAMPLES)]),
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
        },
        batch_size=count,
    )
    batch[HOLDER] = NonTensorStack(*[str(index // 4) for index in range(SAMPLES)[rows]])
    tu.assign_non_tensor(batch, use_dynamic_bsz=False, micro_batch_size_per_gpu=8, global_batch_size=SAMPLES)
    return batch


class SampleStore:
    """Has the conditions of each group, by its number."""

    def __init__(self, *, guided: bool) -> None:
        self._guided = guided

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        found = [conditions_of(int(key), guided=self._guided) for key in keys]
        return {
            name: torch.stack([one[name.removeprefix(CONDITION)] for one in found]) for name in select_fields
        }


def make_engine(path: Path, rank_of_adapter: int, *, guided: bool) -> Any:
    model = DiffusionModelConfig(
        path=str(path),
        lora_rank=rank_of_adapter,
        lora_alpha=8,
        denoising=Denoising(
            num_inference_steps=STEPS,
            height=SIDE,
            width=SIDE,
            sde_type="sde",
            noise_level=NOISE,
            guidance_scale=GUIDANCE if guided else None,
            kl=guided,
            ema_decay=0.9,
            ema_every=1,
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
    count, rank_of_adapter, guided = CELLS[cell]
    dist.init_process_group("gloo", init_method=f"file://{folder / cell}", rank=rank, world_size=count)
    path = folder / "model"
    data, share = sampled(ModelFolder(path), guided=guided), SAMPLES // count
    rows = slice(rank * share, (rank + 1) * share)
    vars(diffusion_engine)["tq"] = SampleStore(guided=guided)
    engine = make_engine(path, rank_of_adapter, guided=guided)
    first = whole(engine)

    before = log_probs_of(engine, batch_of(data, rows))
    if rank_of_adapter:
        data["log_probs"][rows] = before
    loss: Callable[..., Any] = partial(ppo_loss_with_scores, actor_config())
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
            velocity_of(served, guided=guided),
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
            "first": first,
            "kl": float(trained["metrics"]["kl_loss"].aggregate()) if guided else 0.0,
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
        kl_loss_coef=KL_COEF,
    )


def by_hand(folder: Path, *, guided: bool) -> None:
    """The step of `full@1`, or of `guided@1`, in plain torch, as Flow-GRPO writes it."""
    torch.set_num_threads(1)
    model_folder, of_steps, base = ModelFolder(folder / "model"), (SAMPLES, WINDOW), tiny_sd3(0)
    data, model, reference = sampled(model_folder, guided=guided), base, tiny_sd3(0)
    if guided:
        model = get_peft_model(
            base, LoraConfig(r=4, lora_alpha=8, target_modules=list(StableDiffusion3.lora_targets))
        )
        engine = torch.load(folder / "guided@1-0.pt")
        model.load_state_dict(engine["first"])
        data["log_probs"] = engine["before"]
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer, divergence = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0), 0.0
    for rows in (slice(0, 8), slice(8, 16)):

        def of(policy: Any, rows: slice = rows) -> Any:
            return evaluate(
                velocity_of(policy, guided=guided),
                latents=data["latents"][rows],
                steps=data["steps"][rows],
                conditions={name: value[rows] for name, value in data["conditions"].items()},
                schedule=model_folder.schedule(STEPS, SIDE, SIDE),
                kind="sde",
                noise_level=NOISE,
            )

        found = of(model)
        ratio = (found.log_probs - data["log_probs"][rows]).exp()
        advantages = data["advantages"][rows, None]
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)).sum()
        if guided:
            with torch.no_grad():
                means = of(reference).means
            std = found.transition.std.view(8, WINDOW)
            kl = ((found.means - means).square().mean((2, 3, 4)) / (2 * std.square())).sum()
            loss, divergence = loss + KL_COEF * kl, divergence + float(kl)
        (loss / math.prod(of_steps)).backward()
    norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    values = {"grad_norm": float(norm), "weights": model.state_dict(), "kl": divergence / math.prod(of_steps)}
    torch.save(values, folder / f"by_hand{'_guided' * guided}.pt")


if __name__ == "__main__":
    meet = Path(sys.argv[1])
    tiny_folder(meet / "model")
    printed = {"by_hand": fork_ranks(lambda _: by_hand(meet, guided=False), range(1))}
    for name, cell in CELLS.items():
        printed[name] = fork_ranks(partial(run_rank, cell=name, folder=meet), range(cell.ranks))
    printed["by_hand_guided"] = fork_ranks(lambda _: by_hand(meet, guided=True), range(1))
    sys.stdout.write(json.dumps(printed))
