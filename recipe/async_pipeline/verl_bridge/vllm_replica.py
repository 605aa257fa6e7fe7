# SPDX-License-Identifier: Apache-2.0
"""A vLLM rollout server that takes whole versions, and stamps what it generates with them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from verl.plugin.platform import get_platform
from verl.single_controller.ray import ResourcePoolManager
from verl.utils.device import get_device_name, get_resource_name
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from ..errors import WeightSyncError
from ..weight_sync.arena import ArenaReader
from ..weight_sync.manifest import decode
from .device_holder import DeviceHolder, HeldDevice

SHARES_OF_A_DEVICE = 2
"""verl splits each device of a rollout pool in two: one share is held, one is for its own helpers."""
EXTENSION = "recipe.async_pipeline.verl_bridge.vllm_worker.PipelineWorkerExtension"


class PipelineVLLMServer(vLLMHttpServer):
    """verl's server. Requests in flight survive a load; their spans are recorded by version."""

    global_steps: int | None
    """The version that is served; verl's own name for it."""
    _reader: ArenaReader | None = None
    _loading = False

    def _get_worker_extension_cls(self) -> str:
        return EXTENSION

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        if self.config.tensor_model_parallel_size == 1:
            # One device needs no process of its own beside the engine core.
            engine_kwargs.setdefault("distributed_executor_backend", "uni")

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        # A version must not reuse keys and values that another one computed.
        self.engine.generate = self._with_salt(self.engine.generate)

    def _with_salt(self, generate: Any) -> Any:
        def salted(prompt: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            if isinstance(prompt, dict):
                # While a load is under way nobody can say which version will fill the cache: share nothing.
                salt = uuid.uuid4().hex if self._loading else f"v{self.global_steps}"
                prompt = {**prompt, "cache_salt": salt}
            result: AsyncGenerator[Any, None] = generate(prompt, *args, **kwargs)
            return result

        return salted

    async def load_version(self, manifest: bytes, piece_bytes: int, timeout_s: float) -> dict[str, float]:
        """Check, load, prove and announce one version, in this order.

        The checksums are computed here, outside the engine, so that generation stands still only for
        the copy. Raises WeightSyncError: not newer, corrupt, too slow; ProofError: not what is served.
        """
        started = time.perf_counter()
        described = decode(manifest)
        if self.global_steps is not None and described.version <= self.global_steps:
            raise WeightSyncError(
                f"replica {self.replica_rank} serves v{self.global_steps} and was offered v{described.version}; "
                "versions only move forward"
            )
        self._reader = self._reader or ArenaReader()
        await asyncio.to_thread(self._reader.verify, described)
        verified = time.perf_counter()
        self._loading = True
        # If the load fails, nobody knows what is served, so it stays "loading": no prefix is shared.
        reports = await self.engine.collective_rpc("load_snapshot", timeout_s, (manifest, piece_bytes))
        self.global_steps = described.version
        self._loading = False
        return {
            "transfer_s": verified - started,
            "load_s": time.perf_counter() - verified,
            "prove_s": max(r["prove_s"] for r in reports),
            "tensors_proved": min(r["tensors_proved"] for r in reports),
        }

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        """As verl's, stamped with the versions at start and finish instead of the latter alone."""
        first = self.global_steps
        output = await super().generate(*args, **kwargs)
        output.extra_fields["min_global_steps"] = first
        output.extra_fields["max_global_steps"] = self.global_steps
        return output


class PipelineVLLMReplica(vLLMReplica):
    """verl's replica, running our server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(PipelineVLLMServer)

    async def init_standalone(self) -> None:
        """Reserve the devices and start the server on them."""
        self.rollout_mode = RolloutMode.STANDALONE
        name = f"rollout_pool_{self.replica_rank}{self.name_suffix}"
        pools = ResourcePoolManager(
            resource_pool_spec={name: [self.gpus_per_replica_node] * self.nnodes},
            mapping=None,
            max_colocate_count=SHARES_OF_A_DEVICE,
        )
        pools.create_resource_pool()
        self.resource_pool = pools.resource_pool_dict[name]
        groups = self.resource_pool.get_placement_groups(device_name=get_device_name())
        options = get_platform().ray_resource_options(1 / SHARES_OF_A_DEVICE)
        self.workers = [
            HeldDevice(
                ray.remote(DeviceHolder)
                .options(
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
                    name=f"rollout_device_{self.replica_rank}{self.name_suffix}_{number}_{bundle}",
                    **options,
                )
                .remote(),
                get_resource_name(),
            )
            for number, group in enumerate(groups)
            for bundle in range(group.bundle_count)
        ]
        await self.launch_servers()
