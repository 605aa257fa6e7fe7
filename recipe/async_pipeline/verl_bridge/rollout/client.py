# SPDX-License-Identifier: Apache-2.0
"""Sends requests to rollout replicas; one whose replica died while it was answered goes to another, or to
the first that comes back.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from ...core.clock import within
from ...errors import WaitTimeout
from ..agent_loop.partial_rollouts import Open, Transcript, continued
from ..agent_loop.version_spans import take_turn
from ..ray_calls import ASK_S, cause_of
from .router import Router, servers_of

logger = logging.getLogger(__name__)
REFRESH_S = 1.0
"""How long a client goes on with the replicas that it knows before it asks again, beside its requests."""
NONE_LEFT = "No available servers"
"""What verl's balancer says then; the reason is what the last of them died of."""
DEATHS = 5
"""A request during which so many replicas have died, one after another, is not asked again: it may be what
they die of.
"""
ENGINE_DEAD = "EngineDeadError"
"""vLLM's; by name, since importing vLLM for it would cost each agent loop worker seconds."""


class PipelineLLMClient(LLMServerClient):
    """verl's client. What a dead replica had answered is lost, and answered again by another one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._server_of: dict[str, str] = {}
        self._asked: dict[str, tuple[ray.actor.ActorHandle, str]] = {}
        """Of each request that is being answered: the server, and the request's name there."""
        self._last_death: Exception | None = None
        self._router: Router | None = Router()
        """None: verl's balancer decides in a way of its own, so it is asked."""
        self._known_since = -math.inf
        self._asking: asyncio.Task[None] | None = None

    async def generate(
        self, request_id: str, *, transcript: Transcript | None = None, **kwargs: Any
    ) -> TokenOutput:
        """As verl's. Where no replica is left, it waits for one to come back.

        Raises what the last replica died of: none came back in time, or as many as `DEATHS` died of, or
        beside, this
        request. Anything else comes through at once.

        What the transcript has of it already is not requested again. Cancelled, it has the server give
        the answer up.
        """
        started = time.perf_counter()
        output = await (
            self._ask(request_id, **kwargs)
            if transcript is None
            else self._go_on(transcript, request_id, **kwargs)
        )
        said = output.extra_fields
        seconds = time.perf_counter() - started
        take_turn(
            len(kwargs["prompt_ids"]),
            said.get("version_spans"),
            str(said.get("replica") or ""),
            len(output.token_ids),
            seconds,
        )
        return output

    async def _go_on(self, transcript: Transcript, request_id: str, **kwargs: Any) -> TokenOutput:
        """Ask for what the transcript does not have yet, and keep the whole there."""
        rollout = self.config.actor_rollout_ref.rollout
        said, asked = transcript.recall(kwargs["prompt_ids"]), kwargs
        if said is not None and not said.finished:
            left = continued(kwargs["sampling_params"], said, rollout.prompt_length, rollout.response_length)
            if left is None:
                said = said._replace(stop_reason="completed")
            else:
                asked = {
                    **kwargs,
                    "prompt_ids": [*kwargs["prompt_ids"], *said.token_ids],
                    "sampling_params": left,
                }
        transcript.open[request_id] = Open(kwargs["prompt_ids"], said, lambda: self._asked.get(request_id))
        try:
            if said is not None and said.finished:
                output = said.output()
            else:
                output = await self._ask(request_id, **asked)
                output = output if said is None else said.joined(output)
        finally:
            del transcript.open[request_id]
        transcript.keep(kwargs["prompt_ids"], output)
        return output

    async def _ask(self, request_id: str, **kwargs: Any) -> TokenOutput:
        deaths = 0
        try:
            while True:
                try:
                    return await super().generate(request_id, **kwargs)
                except Exception as error:
                    if is_death(error) or isinstance(error, ActorUnavailableError):
                        self._last_death, deaths = error, deaths + 1
                        dead = self._server_of[request_id]
                        logger.warning(
                            "request %s: %s is dead or out of reach, asking another replica", request_id, dead
                        )
                        await self._take_out(dead, for_good=is_death(error))
                    elif NONE_LEFT not in str(cause_of(error)) or self._last_death is None:
                        raise
                    if deaths == DEATHS or not await self._somebody_serves():
                        raise self._last_death from error
        except asyncio.CancelledError:
            if request_id in self._asked:
                server, name = self._asked[request_id]
                server.give_up.remote(name)
            raise
        finally:
            self._server_of.pop(request_id, None)
            self._asked.pop(request_id, None)

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, ray.actor.ActorHandle]:
        found = await self._route(request_id)
        server, handle = found or await super()._acquire_server(request_id, **extra)
        self._server_of[request_id] = server
        self._asked[request_id] = (handle, "")
        return server, handle

    async def _route(self, request_id: str) -> tuple[str, ray.actor.ActorHandle] | None:
        """None: verl's balancer has to be asked."""
        if self._router is None:
            return None
        if asyncio.get_running_loop().time() - self._known_since > REFRESH_S and self._asking is None:
            self._asking = asyncio.create_task(self._refresh(), name="refresh replicas")
        if not self._router.servers and self._asking is not None:
            await within(
                asyncio.shield(self._asking),
                ASK_S,
                owner="an agent loop",
                what="the balancer to name the replicas",
            )
        return None if self._router is None else self._router.acquire(request_id)

    async def _refresh(self) -> None:
        """Learn which replicas there are. A balancer that cannot be asked says so when it is asked for
        one.
        """
        try:
            answer = self._load_balancer.__ray_call__.remote(servers_of)
            servers = await within(
                answer, ASK_S, owner="an agent loop", what="the balancer to name the replicas"
            )
            if servers is None:
                self._router = None
            elif self._router is not None:
                self._router.update(servers)
        except (RayError, WaitTimeout) as error:
            logger.warning("the balancer does not say which replicas there are: %s", error)
        finally:
            self._known_since = asyncio.get_running_loop().time()
            self._asking = None

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        if self._router is None:
            super()._release_server(server_id, request_id)
        else:
            self._router.release(server_id)

    def _vllm_request_id(self, request_id: str) -> str:
        name: str = super()._vllm_request_id(request_id)
        self._asked[request_id] = (self._asked[request_id][0], name)
        return name

    async def _take_out(self, dead: str, *, for_good: bool) -> None:
        """Take a dead server out of the rotation. One that is only out of reach, as all of a lost node are
        before Ray knows,
        is left out here until the balancer is asked next: whether it is dead is for the trainer to find
        out."""
        if self._router is not None:
            self._router.remove(dead)
            if not for_good:
                await asyncio.sleep(0 if self._router.servers else REFRESH_S)
                return
        removed = self._load_balancer.remove_servers.remote([dead])
        await within(removed, ASK_S, owner="an agent loop", what=f"the balancer to give {dead} no more work")

    async def _somebody_serves(self) -> bool:
        """Wait for a replica, if there is none; False: none came back in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + float(self.config.trainer.v1.async_pipeline.wait_timeout_s)
        while True:
            asked = self._load_balancer.get_all_servers.remote()
            if await within(
                asked, ASK_S, owner="an agent loop", what="the balancer to name those that are left"
            ):
                if self._router is not None and not self._router.servers:
                    await self._refresh()
                return True
            if loop.time() >= deadline:
                return False
            # The balancer can be asked, but does not call.
            await asyncio.sleep(REFRESH_S)


def is_death(error: Exception) -> bool:
    """Did the server's process end, or the engine below it?"""
    return isinstance(error, ActorDiedError) or type(cause_of(error)).__name__ == ENGINE_DEAD
