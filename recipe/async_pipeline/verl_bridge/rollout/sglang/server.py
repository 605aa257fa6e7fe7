# SPDX-License-Identifier: Apache-2.0
"""verl's SGLang server, which also loads published versions and records which version wrote which token."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any, ClassVar

from sglang.utils import TypeBasedDispatcher
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer, SGLangReplica

from ....errors import EngineDeadError
from ....weight_sync.engine.versioned_engine import Loaded, Salts
from ... import replaced
from ...calls.control_calls import server_actor
from ...cpu import prefork
from ...cpu.cpu_platform import is_cpu
from ..standalone_replica import StandaloneReplica
from ..versioned_server import VersionedServer, is_one_node, loopback_of, name_node
from . import lora, scheduler
from .arguments import CORES, all_cores, run_arguments
from .engine import serve_versions
from .pictures import keep_tokens, placeholders


def use_own_children(config: Any, run_scheduler: Callable[..., None]) -> None:
    """Have SGLang start this package's child processes, on a CPU with the arguments that it needs there.

    Call it in the server's process before the launch. `config` is the rollout's; `run_scheduler` is found by
    its name in the scheduler's process.
    """
    configured = (config.engine_kwargs or {}).get("sglang") or {}
    arguments = run_arguments(
        configured, int(config.max_num_seqs), int(config.max_model_len), on_cpu=is_cpu()
    )
    if is_cpu():
        os.environ.setdefault(CORES, all_cores(int(config.tensor_model_parallel_size)))
    config.engine_kwargs["sglang"] = arguments
    replaced.apply("SGLang's server", run_scheduler=run_scheduler)
    if prefork.begun():
        replaced.apply("SGLang's server on a CPU")


class PipelineSGLangServer(VersionedServer, SGLangHttpServer):
    """verl's server. Records which version wrote which tokens; see `VersionedEngine`."""

    run_scheduler: ClassVar[Callable[..., None]] = staticmethod(scheduler.run_scheduler_process)
    """What the processes of the ranks run."""
    _server_address: str

    async def launch_server(self, master_address: str | None = None, master_port: int | None = None) -> None:
        """Start the engine, and its HTTP server on the loopback address only: it does not authenticate
        requests.

        This package's requests come over a Unix socket, from other nodes through Ray. On several nodes the
        replica keeps its node's address as its name.
        """
        # Other users of this machine are excluded too: the engine's sockets are in a directory open to
        # all.
        os.umask(0o077)
        use_own_children(self.config, self.run_scheduler)
        if self.nnodes > 1:
            name_node(self._server_address, "SGLANG_HOST_IP")
        node, self._server_address = self._server_address, loopback_of(self._server_address)
        await super().launch_server(master_address, master_port)
        self._children = multiprocessing.active_children()
        if self.node_rank:
            # Its ranks are driven by the first node's.
            self.serve_control_calls()
            return
        if not await is_one_node():
            self._server_address = node

        if self.lora_as_adapter:
            await self.tokenizer_manager.lora_registry.register(lora.served_reference())
        # verl's server of vLLM passes this option, the one of SGLang does not.
        defaults: dict[str, Any] = {"ignore_eos": bool(self.config.get("ignore_eos", False))}
        processor = self.tokenizer_manager.mm_processor
        if processor is not None:
            keep_tokens(processor)
            defaults["logit_bias"] = placeholders(processor)
        self._served = serve_versions(self.tokenizer_manager, TypeBasedDispatcher, defaults)
        self._versioned = self._served.versioned
        self.serve_control_calls()

    async def _load_into_engine(
        self, manifest: bytes, piece_bytes: int, timeout_s: float, salts: Salts | None
    ) -> Loaded:
        return await self._served.load(manifest, piece_bytes, salts)

    async def _stage_boards(self, manifest: bytes, timeout_s: float) -> list[str | None]:
        boards: list[str | None] = await self._served.calls.call("stage", manifest)
        return boards

    async def _answers(self) -> None:
        await self._served.calls.call("check")

    def _death(self) -> BaseException | None:
        dead = [child for child in self._children if not child.is_alive()]
        if not dead:
            return None
        names = ", ".join(f"{child.name} (exit code {child.exitcode})" for child in dead)
        return EngineDeadError(f"replica {self.replica_rank}: SGLang's processes have ended: {names}")


class PipelineSGLangReplica(StandaloneReplica, SGLangReplica):
    """verl's replica with this package's server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        server_class = server_actor(PipelineSGLangServer)
        self.server_class = prefork.started_early(server_class, "sglang") if is_cpu() else server_class
