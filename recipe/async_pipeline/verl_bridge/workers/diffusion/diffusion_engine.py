# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP engine for the transformer of an image pipeline: each SDE step is one token of a response.

`responses` of a sample are the indices of its SDE steps in the schedule, and the log-prob of a token is that
of its step. verl's advantages, policy losses, corrections and metrics then form Flow-GRPO. Further
columns of a batch:

| column | shape | |
|---|---|---|
| `latents` | (samples, steps + 1, channels, height, width) | before the first SDE step, and after each |
| `conditions_in` | (samples) | key of the response that holds what the text encoders say about the prompt |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from cachetools import LRUCache
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import distributed
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine.utils import detach_tree

from ....diffusion.families import stacked
from ....diffusion.sde import evaluate
from ....errors import CheckpointError, ConfigError
from ...rollout.diffusers.fields import CONDITION, HOLDER
from ...store.sample_columns import PARTITION
from ..loss_registry import KL

WHOLE = "average"
"""Folder of a checkpoint with the whole average."""
_STEPS = "steps"


class MovingAverage:
    """Of the trained parameters of a module that FSDP2 has sharded.

    The exponential moving average of trained weights, as in the public code of Flow-GRPO (arXiv 2505.05470).

    Each rank keeps its shards, in float32 in host memory. A checkpoint has them for a resume, and the whole
    average as files that peft or diffusers read. Images are drawn with the trained weights, not with the
    average.
    """

    def __init__(self, module: torch.nn.Module, decay: float, every: int) -> None:
        """`every`: optimizer steps from one update of the average to the next."""
        self._module, self._decay, self._every = module, decay, every
        self._steps = 0
        self._kept = {name: _local(one).float().cpu().clone() for name, one in self._trained()}

    @torch.no_grad()
    def step(self) -> None:
        """Note that an optimizer step was made.

        The first weights count less at the beginning: the decay is at most (1 + n) / (10 + n) at update n.
        """
        self._steps += 1
        updates, left = divmod(self._steps, self._every)
        if left:
            return
        decay = min(self._decay, (1 + updates) / (10 + updates))
        for name, parameter in self._trained():
            self._kept[name].lerp_(_local(parameter).float().cpu(), 1 - decay)

    def save(self, folder: Path, rank: int, ranks: int) -> None:
        """Write what a resume needs, and on rank 0 the whole average. A collective."""
        save_file({**self._kept, _STEPS: torch.tensor(self._steps)}, folder / _file_of(rank, ranks))
        whole = {name: self._whole(name, one) for name, one in self._trained()}
        if rank == 0:
            self._export(folder / WHOLE, whole)

    def load(self, folder: Path, rank: int, ranks: int) -> None:
        """Continue from what `save` wrote. Raises CheckpointError if it is missing or of another model."""
        path = folder / _file_of(rank, ranks)
        if not path.is_file():
            raise CheckpointError(f"{folder} has no moving average; leave diffusion.ema_decay as it was")
        saved = load_file(path)
        steps = int(saved.pop(_STEPS))
        if saved.keys() != self._kept.keys():
            raise CheckpointError(f"{path} is of another model: its tensors have other names")
        self._kept, self._steps = saved, steps

    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, one) for name, one in self._module.named_parameters() if one.requires_grad)

    def _whole(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        kept = self._kept[name]
        if not isinstance(parameter, DTensor):
            return kept
        mesh, stride = parameter.device_mesh, parameter.stride()
        local = kept.to(mesh.device_type)
        whole = DTensor.from_local(
            local, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=stride
        )
        return whole.full_tensor().cpu()

    def _export(self, folder: Path, whole: dict[str, torch.Tensor]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        module: Any = self._module
        if isinstance(module, PeftModel):
            save_file(get_peft_model_state_dict(module, whole), folder / "adapter_model.safetensors")
            module.peft_config["default"].save_pretrained(folder)
            return
        buffers = {name: one for name, one in module.state_dict().items() if name not in whole}
        save_file({**buffers, **whole}, folder / "diffusion_pytorch_model.safetensors")
        module.config.save_pretrained(folder)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def _file_of(rank: int, ranks: int) -> str:
    return f"average_rank_{rank}_of_{ranks}.safetensors"


KEPT_BYTES = 1 << 28
"""Of conditions in a worker: a step reads them for old log-probs, and again to train. Later steps do not."""


class PromptConditions:
    """Reads the conditions of responses by the keys of the responses that hold them.

    They are larger than all else that a step needs of an image. One response of each prompt has them in the
    sample store, and the others have its key.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: of the family's conditions."""
        self._names = names
        self._kept: LRUCache[str, Mapping[str, torch.Tensor]] = LRUCache(KEPT_BYTES, _num_bytes)

    def of(self, holders: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the conditions of a batch, a row for each holder, on the CPU."""
        found = {key: self._kept[key] for key in {*holders} if key in self._kept}
        if missing := sorted({*holders} - found.keys()):
            columns = [CONDITION + name for name in self._names]
            data = tq.kv_batch_get(keys=missing, partition_id=PARTITION, select_fields=columns)
            for place, key in enumerate(missing):
                found[key] = {name: data[CONDITION + name][place] for name in self._names}
                if _num_bytes(found[key]) <= KEPT_BYTES:
                    self._kept[key] = found[key]
        return stacked([found[key] for key in holders])


def _num_bytes(conditions: Mapping[str, torch.Tensor]) -> int:
    return sum(one.nbytes for one in conditions.values())


@EngineRegistry.register(model_type="diffusion_model", backend=["fsdp", "fsdp2"], device=["cuda", "npu"])
class DiffusionFSDPEngine(FSDPEngine):  # type: ignore[misc]
    """Trains a transformer of diffusers. Its model configuration is a `DiffusionModelConfig`."""

    _conditions: PromptConditions | None = None
    _average: MovingAverage | None = None

    def initialize(self) -> None:
        super().initialize()
        how = self.model_config.denoising
        if how.ema_decay is not None and not self.engine_config.forward_only:
            self._average = MovingAverage(self.module, how.ema_decay, how.ema_every)

    def _build_module(self) -> torch.nn.Module:
        """Load the transformer from the pipeline folder."""
        import diffusers

        config = self.model_config
        dtype = PrecisionType.to_dtype(self.engine_config.model_dtype or "fp32")
        of_family = getattr(diffusers, config.folder.family.transformer)
        module: torch.nn.Module = of_family.from_pretrained(
            config.folder.transformer, torch_dtype=dtype, local_files_only=True
        )
        if config.enable_gradient_checkpointing:
            module.enable_gradient_checkpointing()
        answer_as_language_model(module)
        return module

    def _build_lora_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Put adapters around the layers; verl's method is for causal language models."""
        from peft import LoraConfig, get_peft_model

        config = self.model_config
        adapter = LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules=config.adapted_modules,
            bias="none",
        )
        adapted: torch.nn.Module = get_peft_model(module, adapter)
        # Parameters that FSDP shards together must have one dtype.
        base = next(p.dtype for p in adapted.parameters() if not p.requires_grad)
        for parameter in adapted.parameters():
            parameter.data = parameter.data.to(base)
        return adapted

    def forward_step(
        self, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Compute the log-probs of all steps of a micro-batch in one forward, and the loss."""
        micro_batch = micro_batch.to(get_device_id())
        how, latents = self.model_config.denoising, dense(micro_batch["latents"])
        evaluated = partial(
            evaluate,
            self._velocity,
            latents=latents,
            steps=steps_of(micro_batch["responses"], latents),
            conditions=self._conditions_of(micro_batch),
            schedule=self.model_config.schedule,
            kind=how.sde_type,
            noise_level=how.noise_level,
        )
        with self._precision():
            values = evaluated()
        lengths = micro_batch["prompts"].offsets().diff().tolist()
        output = {"log_probs": as_verl_has_them(values.log_probs, lengths)}
        if tu.get_non_tensor_data(micro_batch, key="calculate_entropy", default=False):
            entropy = values.transition.entropy().to(latents.device).view_as(values.log_probs)
            output["entropy"] = as_verl_has_them(entropy, lengths)

        loss, metrics = torch.tensor(1.0, device=latents.device), {}
        if loss_function is not None:
            given = output
            if how.kl and not forward_only:
                with torch.no_grad(), self.disable_adapter(), self._precision():
                    reference = evaluated().means
                kl = values.transition.kl(values.means.flatten(0, 1), reference.flatten(0, 1))
                given = {**output, KL: as_verl_has_them(kl.view_as(values.log_probs), lengths)}
            loss, metrics = loss_function(
                model_output=given, data=micro_batch, dp_group=self.get_data_parallel_group()
            )
        elif not forward_only:
            raise ConfigError("training needs a loss function, got none")
        return loss, {
            "model_output": detach_tree(output),
            "loss": loss.detach().item(),
            "metrics": metrics,
        }

    def _conditions_of(self, batch: Any) -> dict[str, torch.Tensor]:
        config = self.model_config
        if self._conditions is None:
            self._conditions = PromptConditions(
                config.folder.family.conditions(config.denoising.guidance_scale)
            )
        found = self._conditions.of(list(batch[HOLDER]))
        return {name: one.to(get_device_id()) for name, one in found.items()}

    def optimizer_step(self) -> Any:
        """Step as verl does, and update the moving average."""
        norm = super().optimizer_step()
        if self._average is not None:
            self._average.step()
        return norm

    def save_checkpoint(self, local_path: str, *more: Any, **others: Any) -> None:
        """Save as verl does, with the moving average."""
        super().save_checkpoint(local_path, *more, **others)
        if self._average is not None:
            self._average.save(Path(local_path), *_place())

    def load_checkpoint(self, local_path: str, *more: Any, **others: Any) -> None:
        """Load as verl does, with the moving average. Raises CheckpointError if the checkpoint has none."""
        super().load_checkpoint(local_path, *more, **others)
        if self._average is not None:
            self._average.load(Path(local_path), *_place())

    def _velocity(self, x: torch.Tensor, sigma: torch.Tensor, conditions: Any) -> torch.Tensor:
        config = self.model_config
        velocity: torch.Tensor = config.folder.family.velocity(
            self.module, x, sigma, conditions, config.denoising.guidance_scale
        )
        return velocity

    def _precision(self) -> Any:
        """Return the context of a forward in the configured precision."""
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)


def _place() -> tuple[int, int]:
    """Return the number of this rank, and how many there are."""
    return distributed.get_rank(), distributed.get_world_size()


def answer_as_language_model(module: Any) -> None:
    """Give a transformer of diffusers what verl asks of a language model when it saves a checkpoint."""
    from diffusers.configuration_utils import FrozenDict

    class SavedConfig(FrozenDict):  # type: ignore[misc]
        """The transformer's config, which can be written next to the weights."""

        def save_pretrained(self, folder: str) -> None:
            text = json.dumps(dict(self), indent=2, default=str)
            Path(folder, "config.json").write_text(text, encoding="utf-8")

    module._internal_dict = SavedConfig(module.config)
    module.can_generate = bool  # which returns False


def dense(column: torch.Tensor) -> torch.Tensor:
    """Return a column whose rows have one shape as a plain tensor; the sample store returns nested ones."""
    return torch.stack(column.unbind()) if column.is_nested else column


def steps_of(responses: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Return the indices of the SDE steps, (samples, steps). Raises ConfigError if they do not fit."""
    flat = responses.values() if responses.is_nested else responses.reshape(-1)
    samples, count = len(latents), latents.shape[1] - 1
    if flat.numel() != samples * count:
        raise ConfigError(
            f"{samples} samples with {count + 1} latents each must have {count} SDE steps each, "
            f"got {flat.numel()} in total; all samples of a batch need windows of one size"
        )
    return flat.view(samples, count)


def as_verl_has_them(values: torch.Tensor, prompt_lengths: Sequence[int]) -> torch.Tensor:
    """Return values of the steps as a language model's output: for prompt and response, one token early."""
    rows = [
        torch.cat([row.new_zeros(length - 1), row, row.new_zeros(1)])
        for row, length in zip(values, prompt_lengths, strict=True)
    ]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
