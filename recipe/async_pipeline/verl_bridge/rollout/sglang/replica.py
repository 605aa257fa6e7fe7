# SPDX-License-Identifier: Apache-2.0
"""An SGLang rollout replica."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

from ...calls.control_calls import server_actor
from ..standalone_replica import StandaloneReplica
from .server import PipelineSGLangServer


class PipelineSGLangReplica(StandaloneReplica, SGLangReplica):
    """verl's replica with this package's server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = server_actor(PipelineSGLangServer)
