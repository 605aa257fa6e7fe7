# SPDX-License-Identifier: Apache-2.0
"""verl's vLLM server, which also loads published versions and records which version wrote which token."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import StructuredOutputsParams

from ....console import echo
from ....core.groups.items import LoadReport
from ....observe.table import MARK
from ....weight_sync.engine.versioned_engine import FORM, Loaded, Salts
from ... import replaced
from ...calls.control_calls import server_actor
from ...cpu import prefork
from ...cpu.cpu_platform import is_cpu
from ..standalone_replica import StandaloneReplica
from ..versioned_server import VersionedServer, is_one_node, loopback_of, name_node
from .engine import progress_by_name, rejections, serve_versions
from .facts import engine_line
from .plugin import IN_PROCESS

ON_DEVICE = "mm_device_do_normalize"
"""Has vLLM normalize pixels in the model. Their mean and deviation are buffers there, which belong to no
checkpoint, so nothing would bring them after `load_format=dummy` has drawn them at random.
"""
EXTENSION = "recipe.async_pipeline.verl_bridge.rollout.vllm.worker.PipelineWorkerExtension"


def run_arguments(ranks: int, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments that a run gives to vLLM besides verl's, unless others are configured."""
    arguments: dict[str, Any] = {ON_DEVICE: False} if hasattr(AsyncEngineArgs, ON_DEVICE) else {}
    # The due step first, also if blocks for keys and values run out: the step due last is computed again.
    arguments["scheduling_policy"] = "priority"
    if ranks == 1:
        # With one device, the engine core needs no worker process.
        arguments["distributed_executor_backend"] = IN_PROCESS if on_cpu else "uni"
    return arguments


class PipelineVLLMServer(VersionedServer, vLLMHttpServer):
    """verl's server. Records which version wrote which tokens; see `VersionedEngine`."""

    _server_address: str

    def _get_worker_extension_cls(self) -> str:
        return EXTENSION

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        own = run_arguments(int(self.config.tensor_model_parallel_size), on_cpu=is_cpu())
        for name, value in own.items():
            if name == ON_DEVICE or name not in engine_kwargs:
                engine_kwargs[name] = value

    async def launch_server(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        dp_rpc_port: int | None = None,
    ) -> None:
        if self.nnodes > 1:
            name_node(self._server_address, "VLLM_HOST_IP")
        await super().launch_server(master_address, master_port, dp_rpc_port)

    async def run_headless(self, args: Any) -> None:
        """Run the ranks of a further node of the replica; the engine core of the first node drives them.

        If one of them ends, this process does, and the next check of the replica fails.
        """
        os.umask(0o077)
        await super().run_headless(args)
        self.serve_control_calls()

    async def run_server(self, args: Any) -> None:
        """Run the server on the loopback address only: its HTTP server does not authenticate requests.

        This package's requests come over a Unix socket, from other nodes through Ray. On several nodes the
        replica keeps its node's address as its name.
        """
        # Other users of this machine are excluded too: the engine's sockets are in a directory open to
        # all.
        os.umask(0o077)
        if prefork.begun():
            replaced.apply("vLLM's server")
        node, self._server_address = self._server_address, loopback_of(self._server_address)
        await super().run_server(args)
        if not await is_one_node():
            self._server_address = node
        self._versioned = serve_versions(self.engine, rejections())
        self.serve_control_calls()
        if self.replica_rank == 0:
            (first, *_) = await self.engine.collective_rpc("engine_facts")
            echo(f"{MARK} {engine_line(version('vllm'), first)}")

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        """See `VersionedServer.generate`. The form of a response becomes an object of vLLM."""
        params = kwargs["sampling_params"]
        if FORM in params:
            kwargs["sampling_params"] = {**params, FORM: StructuredOutputsParams(**params[FORM])}
        return await super().generate(*args, **kwargs)

    async def _load_into_engine(
        self, manifest: bytes, piece_bytes: int, timeout_s: float, salts: Salts | None
    ) -> Loaded:
        core = self.engine.engine_core
        answer = await core.call_utility_async("load_snapshot", manifest, piece_bytes, timeout_s, salts)
        reports, progress = answer
        return Loaded([LoadReport(**of_rank) for of_rank in reports], progress_by_name(progress))

    async def _stage_boards(self, manifest: bytes, timeout_s: float) -> list[str | None]:
        boards: list[str | None] = await self.engine.collective_rpc("stage_snapshot", timeout_s, (manifest,))
        return boards

    async def _answers(self) -> None:
        await self.engine.engine_core.call_utility_async("is_scheduler_paused")

    def _death(self) -> BaseException | None:
        if self.node_rank:
            return None
        return self.engine.dead_error if self.engine.errored else None


class PipelineVLLMReplica(StandaloneReplica, vLLMReplica):
    """verl's replica with this package's server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        server_class = server_actor(PipelineVLLMServer)
        self.server_class = prefork.started_early(server_class, "vllm") if is_cpu() else server_class
