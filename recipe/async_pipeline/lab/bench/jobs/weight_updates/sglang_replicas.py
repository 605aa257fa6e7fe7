# SPDX-License-Identifier: Apache-2.0
"""SGLang replicas of benchmarks: verl's own, which also starts on a CPU, and replicas of both kinds whose
engines record their steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry

from .....verl_bridge.calls.control_calls import server_actor
from .....verl_bridge.rollout.server_manager import PipelineServerManager
from .....verl_bridge.rollout.sglang import scheduler as children
from .....verl_bridge.rollout.sglang.server import (
    PipelineSGLangReplica,
    PipelineSGLangServer,
    use_own_children,
)
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
        self.server_class = server_actor(TimedServer)


class VerlServer(SGLangHttpServer):  # type: ignore[misc]
    """verl's own server."""

    run_scheduler: ClassVar[Callable[..., None]] = staticmethod(children.run_scheduler_process)

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """Start the engine as verl does, on a CPU with the arguments that it needs there."""
        use_own_children(self.config, self.run_scheduler)
        await super().launch_server(*args, **kwargs)


class TimedVerlServer(VerlServer):
    """verl's own server, whose engine records its steps."""

    run_scheduler = staticmethod(run_scheduler_process)


class VerlReplica(SGLangReplica):  # type: ignore[misc]
    """verl's own replica."""

    runs: ClassVar[type[VerlServer]] = VerlServer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(self.runs)


class TimedVerlReplica(VerlReplica):
    """verl's own replica, whose engine records its steps."""

    runs = TimedVerlServer


def use_verls() -> None:
    """Have verl's managers of this process start verl's own replicas with what a CPU needs."""
    RolloutReplicaRegistry.register("sglang", lambda: VerlReplica)


def use_timed() -> None:
    """Have the managers of this process start replicas whose engines record their steps."""
    PipelineServerManager.rollout_replica_class = TimedReplica
    RolloutReplicaRegistry.register("sglang", lambda: TimedVerlReplica)
