# SPDX-License-Identifier: Apache-2.0
"""Sends requests to rollout replicas; one whose replica died while it was answered goes to another."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayTaskError
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

logger = logging.getLogger(__name__)
NONE_LEFT = "No available servers"
"""What verl's balancer says then; the reason is what the last of them died of."""
ENGINE_DEAD = "EngineDeadError"
"""vLLM's; by name, since importing vLLM for it would cost each agent loop worker seconds."""


class PipelineLLMClient(LLMServerClient):
    """verl's client. What a dead replica had answered is lost, and answered again by another one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._server_of: dict[str, str] = {}
        self._last_death: Exception | None = None

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        """As verl's. Raises what the last replica died of; anything else comes through at once."""
        try:
            while True:
                try:
                    return await super().generate(request_id, **kwargs)
                except Exception as error:
                    if NONE_LEFT in str(cause_of(error)) and self._last_death is not None:
                        raise self._last_death from error
                    if not is_death(error):
                        raise
                    self._last_death = error
                    if not await self._others_than(self._server_of[request_id]):
                        raise
                    logger.warning("request %s: %s is dead, asking another replica", request_id, self._server_of[request_id])
        finally:
            self._server_of.pop(request_id, None)

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, ray.actor.ActorHandle]:
        server, handle = await super()._acquire_server(request_id, **extra)
        self._server_of[request_id] = server
        return server, handle

    async def _others_than(self, dead: str) -> list[str]:
        """Take a dead server out of the rotation; returns those that are left."""
        await self._load_balancer.remove_servers.remote([dead])
        left: list[str] = await self._load_balancer.get_all_servers.remote()
        return left


def is_death(error: Exception) -> bool:
    """Did the server's process end, or the engine below it?"""
    return isinstance(error, ActorDiedError) or type(cause_of(error)).__name__ == ENGINE_DEAD


def cause_of(error: Exception) -> BaseException:
    """What was raised in the other process, if it was another one."""
    return error.cause if isinstance(error, RayTaskError) else error
