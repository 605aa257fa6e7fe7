# SPDX-License-Identifier: Apache-2.0
"""The exponential moving average of trained weights, as in the public code of Flow-GRPO (arXiv 2505.05470).

Each rank keeps its shards, in float32 in host memory. A checkpoint has them for a resume, and the whole
average as files that peft or diffusers read. Images are drawn with the trained weights, not with the average.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from ....errors import CheckpointError

WHOLE = "average"
"""Folder of a checkpoint with the whole average."""
_STEPS = "steps"


class MovingAverage:
    """Of the trained parameters of a module that FSDP2 has sharded."""

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
