# SPDX-License-Identifier: Apache-2.0
"""A worker that only computes log-probs, with published weights."""

from __future__ import annotations

import copy
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu

from ..rules.adapter_config import without_adapters
from .training_worker import PipelineWorker

SHARED_WITH_ACTOR = (
    "model_dtype",
    "mixed_precision",
    "ulysses_sequence_parallel_size",
    "entropy_from_logits_with_chunking",
)
"""Keys of `fsdp_config` that decide what log-probs the actor would compute."""


class LogProbWorker(PipelineWorker):
    """The published policy, forward only, on separate devices. Created with the role `ref`; see
    `logp_config`.
    """

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    def compute_log_prob(self, data: TensorDict) -> Any:
        """Compute per-token log-probs and entropies of prompt and response, jagged, as verl's actor does.

        With `router_replay` the result also has the routing of each token, which the update replays.
        """
        if self.enable_routing_replay:
            tu.assign_non_tensor_data(data, "enable_routing_replay", True)
        output = self.ref.infer_batch(data=data)
        return None if output is None else output.cpu()


def logp_config(config: DictConfig) -> DictConfig:
    """Copy the actor's settings to where a forward-only worker reads them. `config` is
    `actor_rollout_ref`. Merged adapters are published as whole weights, so the copy has none.
    """
    if OmegaConf.select(config, "model.lora.merge"):
        config = without_adapters(config)
    made = copy.deepcopy(config)
    actor, ref, rollout = made.actor, made.ref, made.rollout
    OmegaConf.set_struct(made, False)
    ref.strategy = actor.strategy
    if "use_torch_compile" in actor:
        ref.use_torch_compile = actor.use_torch_compile
    if actor.strategy == "megatron":
        ref.megatron = copy.deepcopy(actor.megatron)
        ref.megatron.forward_only = True
    else:
        for name in SHARED_WITH_ACTOR:
            if name in actor.fsdp_config:
                ref.fsdp_config[name] = actor.fsdp_config[name]
    for name in ("micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu"):
        ref[f"log_prob_{name}"] = rollout[f"log_prob_{name}"]
    return made
