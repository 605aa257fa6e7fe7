# SPDX-License-Identifier: Apache-2.0
"""Workers that compute log-probs on separate devices. If one dies, its whole group restarts on the same
devices.

Other stages are not affected: these workers are forward-only, and the batch is computed again. Workers on
the training devices cannot be replaced this way; if one dies, the run ends and resumes from its
checkpoint.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import ray
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import RayActorError
from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils import tensordict_utils as tu

from ...config.derived.adapters import publishes_adapters
from ..launch.run_config import knobs_of
from .training_worker import PipelineWorker


def without_adapters(config: DictConfig) -> DictConfig:
    """Return a copy of `actor_rollout_ref` for a model that gets no adapters.

    Three forms of a policy with adapters exist in a run. The trainer holds the base and the adapters. Rollout
    replicas hold the base, and get the adapters alone or, with `lora.merge`, whole merged weights. The
    reference is the base: on the training devices it is the trainer's model with its adapters switched off,
    as in verl; on separate devices it is a model without them.
    """
    made = copy.deepcopy(config)
    OmegaConf.set_struct(made, False)
    made.model.update(lora_rank=0, lora_adapter_path=None)
    if made.model.get("lora") is not None:
        made.model.lora.rank = 0
    return made


SHARED_WITH_ACTOR = (
    "model_dtype",
    "mixed_precision",
    "ulysses_sequence_parallel_size",
    "entropy_from_logits_with_chunking",
)
"""Keys of `fsdp_config` that decide what log-probs the actor would compute."""


class LogProbWorker(PipelineWorker):
    """The published policy, forward only, on its own devices. Has the role `ref`; see `logp_config`."""

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


T = TypeVar("T")
ATTEMPTS = 3
"""Give up after this many deaths over one batch: the batch itself may cause them."""
BACK_OFF_S = 1.0
"""Delay before the first restart; it doubles for each further one."""


def start_group(role: str, pool: Any, config: DictConfig) -> RayWorkerGroup:
    """Start the workers of `logp` or `ref_logp` on a pool, with the initial weights of the run. Blocks."""
    worker, settings = (
        (LogProbWorker, logp_config(config.actor_rollout_ref))
        if role == "logp"
        else (PipelineWorker, reference_config(config))
    )
    made = RayClassWithInitArgs(ray.remote(worker), config=settings, role="ref")
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name=config.trainer.device)
    group.init_model()
    return group


def reference_config(config: DictConfig) -> DictConfig:
    """Return `actor_rollout_ref` for a reference policy with separate devices.

    Only a reference that gets published adapters has adapters itself.
    """
    if has_adapters(config):
        return cast("DictConfig", config.actor_rollout_ref)
    return without_adapters(config.actor_rollout_ref)


def has_adapters(config: DictConfig) -> bool:
    """Return whether a reference policy with separate devices takes published adapters."""
    return publishes_adapters(config) and knobs_of(config).training.ref_refresh_every > 0


def end_group(group: Any) -> None:
    """End the workers, whatever their state."""
    for worker in group.workers:
        ray.kill(worker)


async def retry_on_actor_death(
    work: Callable[[], Awaitable[T]], restart: Callable[[Exception], Awaitable[None]]
) -> T:
    """Await `work`; if a worker dies during it, call `restart` and begin again.

    Raises the workers' error after `ATTEMPTS` deaths. Other errors propagate at once.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await work()
        except RayActorError as error:
            if attempt == ATTEMPTS:
                raise
            await asyncio.sleep(BACK_OFF_S * 2 ** (attempt - 1))
            await restart(error)
    raise AssertionError("the last attempt returns or raises")
