# SPDX-License-Identifier: Apache-2.0
"""SGLang replicas whose engines record their steps: this package's, and verl's own."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry

from ..control_calls import GROUPS
from ..rollout.server_manager import PipelineServerManager
from ..rollout.sglang.replica import PipelineSGLangReplica
from ..rollout.sglang.server import PipelineSGLangServer, use_own_children
from .sglang_steps import run_scheduler_process

# Only now: this package's stubs must be in place.
from verl.workers.rollout.sglang_rollout.async_sglang_server import (  # isort: skip
    SGLangHttpServer,
    SGLangReplica,
)


class TimedServer(PipelineSGLangServer):
    """This package's server."""

    run_scheduler = staticmethod(run_scheduler_process)


class TimedReplica(PipelineSGLangReplica):
    """This package's replica."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(concurrency_groups=dict(GROUPS))(TimedServer)


class TimedVerlServer(SGLangHttpServer):  # type: ignore[misc]
    """verl's own server."""

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """Start the engine as verl does, on a CPU with the arguments that it needs there."""
        use_own_children(self.config, run_scheduler_process)
        await super().launch_server(*args, **kwargs)


class TimedVerlReplica(SGLangReplica):  # type: ignore[misc]
    """verl's own replica."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(TimedVerlServer)


def use() -> None:
    """Have the managers of this process start these replicas."""
    PipelineServerManager.rollout_replica_class = TimedReplica
    RolloutReplicaRegistry.register("sglang", lambda: TimedVerlReplica)
