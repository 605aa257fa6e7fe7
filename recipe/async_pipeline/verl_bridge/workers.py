# SPDX-License-Identifier: Apache-2.0
"""Worker classes that run on the training devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import ray
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.losses import ppo_loss

from .cpu_platform import is_cpu
from .loss_registry import ppo_loss_with_scores
from .parts import TrainingRanks, held_by

REF_COLUMN = "ref_log_probs_full"
"""verl lets old and reference log-probs share the column `log_probs`; two batches in flight would mix them."""


def offload_without_pinning() -> None:
    """verl keeps a forward-only FSDP2 model in pinned memory, which no machine without accelerator has."""
    policy = transformer_impl.CPUOffloadPolicy
    transformer_impl.CPUOffloadPolicy = lambda pin_memory=True: policy(pin_memory=False)


if is_cpu():
    offload_without_pinning()


class PipelineWorker(ActorRolloutRefWorker):
    """verl's worker, with a gather that can be called by itself and a column of its own for the reference."""

    _ranks: TrainingRanks | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """As verl's, with our losses registered and scores within their reach."""
        super().init_model()
        if "actor" in self.role and self.loss_fn.func is ppo_loss:
            self.actor.set_loss_fn(partial(ppo_loss_with_scores, **self.loss_fn.keywords))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def gather_weights(self, version: int) -> bytes | None:
        """Copy the weights into host memory; rank 0 returns the ticket. A collective of all ranks."""
        self._ranks = self._ranks or TrainingRanks(ray.get_runtime_context().get_node_id())
        held = held_by(self.actor.engine) if self._ranks.on_one_host else None
        ticket: bytes | None
        if held is not None:
            ticket = self.checkpoint_engine.gather_parts(held.parts, version, self._ranks, held.adapter)
        else:
            weights, _ = self.actor.engine.get_per_tensor_param()
            ticket = self.checkpoint_engine.gather(weights, version)
        return ticket

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close_arenas(self) -> None:
        """Unlink the shared memory of this rank."""
        self.checkpoint_engine.close()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    def compute_ref_log_prob(self, data: TensorDict) -> Any:
        """As verl's, under our own column. Per-token log-probs of prompt and response, jagged."""
        output = self.ref.infer_batch(data=data)
        if output is None:
            return None
        output = output.cpu()
        if "log_probs" in output.keys():
            output[REF_COLUMN] = output.pop("log_probs")
        return output
