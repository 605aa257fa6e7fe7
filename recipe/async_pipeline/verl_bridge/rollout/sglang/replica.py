# SPDX-License-Identifier: Apache-2.0
"""An SGLang rollout replica."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

from ...calls.control_calls import server_actor
from ...cpu.cpu_platform import is_cpu
from .. import prefork
from ..standalone_replica import StandaloneReplica
from .server import PipelineSGLangServer


class PipelineSGLangReplica(StandaloneReplica, SGLangReplica):
    """verl's replica with this package's server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        server_class = server_actor(PipelineSGLangServer)
        self.server_class = prefork.started_early(server_class, "sglang") if is_cpu() else server_class
