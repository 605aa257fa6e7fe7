# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron engines on the CPU platform, in float32 or bfloat16, over gloo.

They are verl's own engines with other layers (`spec`), and with what megatron-core needs from CUDA replaced
while they work (`cuda_shim`, `standin`). Users with CUDA get verl's engines unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from verl.workers.engine.megatron.transformer_impl import (
    MegatronEngineWithLMHead,
    MegatronEngineWithValueHead,
)

from ....errors import CheckpointError
from .config import set_rotary_base
from .cuda_shim import cuda_means_cpu, cuda_type_names
from .spec import layer_spec

PROVIDER_FIELDS: dict[str, Any] = {
    # Kernels of Transformer Engine, apex or CUDA.
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "persist_layer_norm": False,
    # Streams.
    "moe_shared_expert_overlap": False,
    # gloo reads a tensor after isend has returned, so it must not be freed before the wait.
    "overlap_p2p_comm": False,
}
"""Fields of Megatron-Bridge's model provider on the CPU platform."""

F = TypeVar("F", bound=Callable[..., Any])


def on_cpu(method: F) -> F:
    """Let `device="cuda"` mean the CPU during a method."""

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with cuda_means_cpu():
            return method(*args, **kwargs)

    return cast(F, run)


class _CpuEngine:
    """What both engines need; mixed in before verl's class."""

    optimizer: Any
    engine_config: Any
    model_config: Any

    def _build_tf_config(self) -> None:
        fields = self.engine_config.override_transformer_config
        for name, value in PROVIDER_FIELDS.items():
            fields.setdefault(name, value)
        fields.setdefault("transformer_layer_spec", layer_spec)
        set_rotary_base(self.engine_config, self.model_config.hf_config)
        super()._build_tf_config()  # type: ignore[misc]

    @on_cpu
    def initialize(self) -> None:
        super().initialize()  # type: ignore[misc]

    @on_cpu
    def forward_backward_batch(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward_backward_batch(*args, **kwargs)  # type: ignore[misc]

    def _build_optimizer(self) -> Any:
        with cuda_type_names():
            return super()._build_optimizer()  # type: ignore[misc]

    @on_cpu
    def optimizer_step(self) -> Any:
        with cuda_type_names():
            return super().optimizer_step()  # type: ignore[misc]

    @on_cpu
    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Save as verl does, and the optimizer's step of each parameter."""
        super().save_checkpoint(local_path, *args, **kwargs)  # type: ignore[misc]
        steps = [float(state["step"]) for state in self._adam_states()]
        _steps_file(local_path).write_text(json.dumps(steps), encoding="utf-8")

    @on_cpu
    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load as verl does, and give each parameter its own optimizer step.

        Without Transformer Engine and apex, megatron-core 0.16.1 cannot load into an optimizer that has not
        stepped yet. It gives all parameters one step tensor, so that each optimizer step would count once
        for each parameter.

        Raises CheckpointError if the steps are missing or of another model.
        """
        self._begin_adam_states()
        # In float32 the optimizer's weights are views of the model's, which autograd would refuse to change.
        with torch.no_grad():
            super().load_checkpoint(local_path, *args, **kwargs)  # type: ignore[misc]
        file = _steps_file(local_path)
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; resume from a checkpoint of this engine")
        steps, states = json.loads(file.read_text(encoding="utf-8")), list(self._adam_states())
        if len(steps) != len(states):
            raise CheckpointError(f"{file} has {len(steps)} parameters, but this model has {len(states)}")
        for state, step in zip(states, steps, strict=True):
            state["step"] = torch.tensor(step)

    def _begin_adam_states(self) -> None:
        """Give each parameter that has not been stepped the optimizer's state before the first step."""
        for optimizer in self._adams():
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                if not optimizer.state[parameter]:
                    optimizer.state[parameter].update(
                        step=torch.tensor(0.0),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )

    def _adam_states(self) -> Iterator[dict[str, Any]]:
        """Return the optimizer's state of each parameter of this rank that has been stepped."""
        for optimizer in self._adams():
            for state in optimizer.state.values():
                if "step" in state:
                    yield state

    def _adams(self) -> Iterator[torch.optim.Optimizer]:
        """Return torch's optimizers, which megatron-core's wrap."""
        for optimizer in getattr(self.optimizer, "chained_optimizers", None) or [self.optimizer]:
            yield optimizer.optimizer


class CpuMegatronEngine(_CpuEngine, MegatronEngineWithLMHead):
    """The engine of the actor and of the reference."""


class CpuMegatronValueEngine(_CpuEngine, MegatronEngineWithValueHead):
    """The engine of the critic."""


def _steps_file(local_path: str) -> Path:
    return Path(local_path) / f"optimizer_steps_rank_{dist.get_rank()}.json"
