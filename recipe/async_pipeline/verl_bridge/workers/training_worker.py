# SPDX-License-Identifier: Apache-2.0
"""Worker classes that run on the training devices."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss

from ...checkpoint import store
from ...checkpoint.tensor_tree import weights_only
from ...core.waits.deadline import within
from ...errors import WeightSyncError
from ...weight_sync.engine.shard_load import RankLoad, load_parts, prove_parts, require_same_adapter
from ...weight_sync.hosts.host_slots import Reader, this_process
from ...weight_sync.memory.arena import ArenaReader
from ...weight_sync.memory.manifest import Manifest, WeightTicket
from .. import replaced
from ..cpu.cpu_platform import is_cpu
from ..store.sample_store import count_cores_once
from ..weights.host_memory_service import HostMemories
from .expert_load import ExpertLoad, replays, require_routes
from .fsdp_shards import TrainingRanks
from .loss_registry import distillation_loss
from .megatron.config import set_rotary_base
from .packed_sequences import register_attention
from .shards import Held, assembled, held_by, offload_again
from .update_log_probs import CORRECTION, UpdateLogProbs

REF_COLUMN = "ref_log_probs_full"
"""verl's old and reference log-probs share the column `log_probs`; two batches in flight would mix them."""


def without_pinned_memory(policy: Any) -> Any:
    """Return FSDP2's policy of a model that only computes forward, without pinned memory."""
    return lambda pin_memory=True: policy(pin_memory=False)


if is_cpu():
    replaced.apply("training on a CPU")
replaced.apply("training without flash-attn")
register_attention()


class SafeLoad:
    """Mixed into a worker of verl: its checkpoints are checked, and hold tensors and plain values only."""

    rank: int

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def damage(self, checkpoint: str, folder: str) -> str | None:
        """Return what is wrong with the files that this rank is to load, or None."""
        return store.damage(Path(checkpoint), folder, self.rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str, *more: Any, **others: Any) -> None:
        """Load as verl does. Raises CheckpointError if the files hold more than tensors and plain values."""
        with weights_only(Path(local_path)):
            super().load_checkpoint(local_path, *more, **others)  # type: ignore[misc]


class EngineWorker(TrainingWorker):
    """verl's worker of one model, whose Megatron engine gets the model's rotary base; reports how evenly a
    mixture of experts is used.
    """

    _expert_load: ExpertLoad | None = None

    def __init__(self, config: Any) -> None:
        if config.engine_config is not None and config.engine_config.strategy == "megatron":
            set_rotary_base(config.engine_config, config.model_config.hf_config)
        if config.model_type == "diffusion_model":
            # Registers the engine with verl.
            from .diffusion import diffusion_engine  # noqa: F401
        super().__init__(config)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict:
        """Train as verl does, and add the load of the experts to the metrics.

        Raises RoutingError if routing is to be replayed, but not all of it was recorded.
        """
        if replays(self.engine_config):
            require_routes(self.engine, data)
        if self._expert_load is None:
            module = self.engine.module
            self._expert_load = ExpertLoad(module if isinstance(module, list) else [module])
        self._expert_load.clear()  # the passes that only computed log-probs
        output = super().train_batch(data)
        metrics = self._expert_load.take()
        if output is not None:
            tu.get(output, "metrics").update(metrics)
        return output

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str, *more: Any, **others: Any) -> None:
        """Save as verl does. A Megatron rank, whose files need not have its number, adds one that has it."""
        super().save_checkpoint(local_path, *more, **others)
        if self.engine_config.strategy == "megatron":
            name = f"megatron_world_size_{self.world_size}_rank_{self.rank}.json"
            Path(local_path, name).write_text("{}", encoding="utf-8")


class PipelineWorker(SafeLoad, ActorRolloutRefWorker):
    """verl's worker, with a separate gather and a separate column for the reference's log-probs."""

    actor_worker_cls = ref_worker_cls = EngineWorker
    _updated: UpdateLogProbs
    _ranks: TrainingRanks | None = None
    _reader: ArenaReader | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Initialize as verl does, with this package's losses registered and scores available to them."""
        super().init_model()
        count_cores_once()
        if "actor" in self.role and self.loss_fn.func is ppo_loss:
            self._updated = UpdateLogProbs()
            self.actor.set_loss_fn(partial(self._updated, **self.loss_fn.keywords))
        elif "actor" in self.role and self.loss_fn.func is distillation_ppo_loss:
            self.actor.set_loss_fn(partial(distillation_loss, **self.loss_fn.keywords))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> Any:
        """Train as verl does; keep the log-probs if they are to be taken from the update."""
        if tu.get(data, CORRECTION) is not None:
            self._updated.begin(data, keeps=self.actor.engine.is_mp_src_rank_with_outputs())
        return super().update_actor(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def log_probs_of_update(self, data: TensorDict) -> Any:
        """Return what the last update has computed for these rows, which `compute_log_prob` would return."""
        return self._updated.columns()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def gather_weights(self, version: int) -> WeightTicket | None:
        """Copy the weights into host memory; one rank of each host returns a ticket, others None.

        A collective.
        """
        host = ray.get_runtime_context().get_node_id()
        self._ranks = self._ranks or TrainingRanks(host)
        held = held_by(self.actor.engine)
        ticket: WeightTicket | None
        if held is not None:
            ticket = self.checkpoint_engine.gather_parts(held.parts, version, self._ranks, held.adapter)
        else:
            whole = assembled(self.actor.engine)
            ticket = self.checkpoint_engine.gather(whole.weights, version, whole.adapter)
        offload_again(self.actor.engine)
        return None if ticket is None else msgspec.structs.replace(ticket, host=host)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_version(self, ticket: WeightTicket, memories: HostMemories, timeout_s: float) -> RankLoad:
        """Load a published version into the forward-only model; return what this rank did. A collective.

        Raises WeightSyncError if it is corrupt or of another model, ProofError if the loaded values
        differ.
        """
        reader = this_process(f"{self.role} rank {self.rank}")
        # Ray runs this method in the thread of an event loop.
        with ThreadPoolExecutor(1) as thread:
            fetched = self._fetch(memories, ticket, reader, timeout_s)
            manifest = thread.submit(asyncio.run, fetched).result()
            self._reader = self._reader or ArenaReader()
            held = self._forward_only()
            require_same_adapter(manifest, held.adapter)
            load_parts(ticket.version, self._reader.tensors(manifest), held.parts)
            compared = prove_parts(manifest, held.parts)
            offload_again(self.ref.engine)
            thread.submit(asyncio.run, memories.release(reader, ticket.version)).result()
        return RankLoad(ticket.version, compared)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_reference(self, folder: str) -> None:
        """Save this rank's shard of the forward-only model."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        tensors = {
            part.name: part.values.detach().cpu().clone(memory_format=torch.contiguous_format)
            for part in self._forward_only().parts
            if part.values is not None
        }
        offload_again(self.ref.engine)
        save_file(tensors, self._file_of_rank(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_reference(self, folder: str) -> None:
        """Load what `save_reference` wrote. Raises WeightSyncError if another model wrote it."""
        saved = load_file(self._file_of_rank(folder))
        parts = {part.name: part.values for part in self._forward_only().parts if part.values is not None}
        if odd := saved.keys() ^ parts.keys():
            raise WeightSyncError(
                f"{folder} and this model differ in {len(odd)} tensors, e.g. {sorted(odd)[0]}"
            )
        with torch.no_grad():
            for name, values in parts.items():
                values.detach().copy_(saved[name])
        offload_again(self.ref.engine)

    def _file_of_rank(self, folder: str) -> str:
        return str(Path(folder) / f"rank_{self.rank}_of_{self.world_size}.safetensors")

    def _forward_only(self) -> Held:
        """Return this rank's parts of the forward-only model; of a model with adapters, only these."""
        held = held_by(self.ref.engine, replicated=True)
        if held is None:
            raise WeightSyncError("this engine cannot load published weights; it must be fsdp2 or megatron")
        return held

    async def _fetch(
        self, memories: HostMemories, ticket: WeightTicket, reader: Reader, timeout_s: float
    ) -> Manifest:
        return await within(
            memories.fetch(ticket, reader, timeout_s),
            timeout_s,
            owner=self.role,
            what=f"the buckets of version {ticket.version}",
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close_arenas(self) -> None:
        """Unlink the shared memory of this rank."""
        self.checkpoint_engine.close()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    def compute_ref_log_prob(self, data: TensorDict) -> Any:
        """Compute per-token log-probs of prompt and response, jagged, into `REF_COLUMN`."""
        return _as_reference(self.ref.infer_batch(data=data))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_base_log_prob(self, data: TensorDict) -> Any:
        """Compute the same with the trained model and its adapters switched off, as `data` asks."""
        return _as_reference(self.actor.infer_batch(data))


def _as_reference(output: Any) -> Any:
    """Return the output of a worker with its log-probs in `REF_COLUMN`."""
    if output is None:
        return None
    output = output.cpu()
    if "log_probs" in output.keys():
        output[REF_COLUMN] = output.pop("log_probs")
    return output


class PipelineCritic(SafeLoad, EngineWorker):
    """verl's critic, which loads tensors and plain values only."""
