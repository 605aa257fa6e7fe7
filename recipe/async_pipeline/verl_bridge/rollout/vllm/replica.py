# SPDX-License-Identifier: Apache-2.0
"""A vLLM rollout replica."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from ...calls.control_calls import server_actor
from ...cpu.cpu_platform import is_cpu
from .. import prefork
from ..standalone_replica import StandaloneReplica
from .server import PipelineVLLMServer


class PipelineVLLMReplica(StandaloneReplica, vLLMReplica):
    """verl's replica with this package's server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        server_class = server_actor(PipelineVLLMServer)
        self.server_class = prefork.started_early(server_class, "vllm") if is_cpu() else server_class
