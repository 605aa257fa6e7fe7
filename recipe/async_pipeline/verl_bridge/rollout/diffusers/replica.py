# SPDX-License-Identifier: Apache-2.0
"""A rollout replica of images: one server on one device."""

from __future__ import annotations

from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.workers.rollout.replica import RolloutReplica

from ...calls.control_calls import server_actor
from ..standalone_replica import StandaloneReplica
from .server import PipelineDiffusersServer


class DiffusersReplica(RolloutReplica):  # type: ignore[misc]
    """What verl's replica classes are for other engines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = server_actor(PipelineDiffusersServer)

    async def launch_servers(self) -> None:
        """Start the server on the node of the reserved device."""
        (worker,) = self.workers
        node, device = await worker.where()
        platform = get_platform()
        environment = {
            **{name: "1" for name in platform.ray_noset_envvars()},
            **platform.rollout_env_vars(),
            platform.visible_devices_envvar(): str(device),
        }
        server = self.server_class.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            runtime_env={"env_vars": environment},
            name=f"image_server_{self.replica_rank}_0{self.name_suffix}",
            max_concurrency=self.max_concurrency,
        ).remote(
            config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
            node_rank=0,
        )
        self.servers.append(server)
        self._server_handle = server
        self._server_address = await server.launch_server.remote()


class PipelineDiffusersReplica(StandaloneReplica, DiffusersReplica):
    """A replica with this package's restarts."""
