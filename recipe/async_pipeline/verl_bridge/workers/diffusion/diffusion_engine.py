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
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from cachetools import LRUCache
from torch import distributed
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine.utils import detach_tree

from ....diffusion.families import stacked
from ....diffusion.policy import evaluate
from ....errors import ConfigError
from ...rollout.diffusers.fields import CONDITION, HOLDER
from ...store.sample_columns import PARTITION
from ..loss_registry import KL
from .moving_average import MovingAverage

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
