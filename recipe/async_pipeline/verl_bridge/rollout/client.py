# SPDX-License-Identifier: Apache-2.0
"""Send requests to rollout replicas, and send them again if a replica dies.

A request whose replica died goes to another one, or waits for the first that returns.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from ...core.waits.deadline import within
from ...errors import VersionNotServed, WaitTimeout
from ...weight_sync.engine.versioned_engine import FORM
from ..agent_loop.episodes.episode import current_attempt, current_episode, take_turn, taken_turns
from ..agent_loop.tokens.partial_rollouts import Open, Transcript, continued
from ..calls.direct_calls import ConnectionLost, DirectActors
from ..calls.ray_calls import ASK_S, cause_of
from ..launch.run_config import ReadOnce, open_requests_of
from .router import Router, servers_of

logger = logging.getLogger(__name__)
REFRESH_S = 1.0
"""Age at which the list of replicas is refreshed, in the background."""
NONE_LEFT = "No available servers"
"""Part of the balancer's message when it has no replica; the cause is the death of the last one, which this
process need not have seen: it may be the replacement of a worker that was lost together with the replica.
"""
DEATHS = 5
"""Give up on a request after this many consecutive replica deaths: the request itself may cause them."""
ENGINE_DEAD = "EngineDeadError"
"""vLLM's error, by name: importing vLLM for it would cost each agent loop worker seconds."""
REFUSALS = ("ValueError", "VLLMClientError")
"""What engines raise for requests that they cannot answer, SGLang and vLLM."""


class PipelineLLMClient(LLMServerClient):
    """verl's client. A response that a replica has begun is lost with it, and generated again elsewhere."""

    config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        share = open_requests_of(self.config).share
        self.config = ReadOnce(self.config)
        self._sessions_reuse = self.config.trainer.v1.async_pipeline.weight_sync.reuse_prefixes == "session"
        self.server_of: dict[str, str] = {}
        """The server of each open request."""
        self._direct = DirectActors("generate")
        self._asked: dict[str, tuple[ray.actor.ActorHandle, str]] = {}
        """For each open request, its server and its id there."""
        self._last_death: Exception | None = None
        self._router: Router | None = Router(share)
        """None if verl's balancer does not use its default rule: it then decides, and nothing is bounded."""
        self._known_since = -math.inf
        self._asking: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None

    async def generate(
        self, request_id: str, *, transcript: Transcript | None = None, **kwargs: Any
    ) -> TokenOutput:
        """Generate as verl does; if no replica is left, wait for one to return.

        If all replicas have as many requests as they may have, the request waits for room; see `Router`.
        Tokens that the transcript already holds are not generated again. On cancellation, the server
        abandons the request.

        Raises WaitTimeout if a turn of a training episode takes longer than it may, and the engine's error if
        it refuses the request; both cost the episode.
        Raises the error that the last replica died of, or the balancer's if this process saw none die, if
        none returns in time, or if `DEATHS` replicas died during this request. Other errors propagate at
        once.
        """
        started, attempt = time.perf_counter(), current_attempt()
        if self._sessions_reuse and (turns := taken_turns()):
            kwargs["session"] = turns[0].spans[0].version
        answering = (
            self._ask(request_id, **kwargs)
            if transcript is None
            else self._continue(transcript, request_id, **kwargs)
        )
        try:
            output = await answering
        except Exception as error:
            if attempt is not None and not refuses_request(error):
                attempt.rollout_failed(error)
            raise
        said = output.extra_fields
        seconds = time.perf_counter() - started
        take_turn(
            len(kwargs["prompt_ids"]),
            said.get("version_spans"),
            str(said.get("replica") or ""),
            len(output.token_ids),
            seconds,
            started,
        )
        return output

    async def _continue(self, transcript: Transcript, request_id: str, **kwargs: Any) -> TokenOutput:
        """Generate what the transcript lacks, and keep the whole response there.

        A partial response of a seeded request is neither continued nor recorded: an engine starts the random
        numbers of a seed with the first token of a request, so a continuation would differ from an
        undisturbed response. Nor is one that must have a form, whose grammar begins with the first token.
        """
        rollout = self.config.actor_rollout_ref.rollout
        said, asked = transcript.recall(kwargs["prompt_ids"]), kwargs
        params = kwargs["sampling_params"]
        is_whole = params.get("seed") is not None or params.get(FORM) is not None
        if said is not None and not said.finished and is_whole:
            said = None
        if said is not None and not said.finished:
            left = continued(params, said, rollout.prompt_length, rollout.response_length)
            if left is None:
                said = said._replace(stop_reason="completed")
            else:
                asked = {
                    **kwargs,
                    "prompt_ids": [*kwargs["prompt_ids"], *said.token_ids],
                    "sampling_params": left,
                }

        transcript.open[request_id] = Open(
            kwargs["prompt_ids"], said, lambda: None if is_whole else self._asked.get(request_id)
        )
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
        if (admitted := current_episode().admitted) is not None:
            kwargs["admitted"] = admitted
        try:
            while True:
                try:
                    return await self._send(request_id, **kwargs)
                except Exception as error:
                    if is_death(error) or isinstance(error, ActorUnavailableError):
                        self._last_death, deaths = error, deaths + 1
                        dead = self.server_of[request_id]
                        logger.warning(
                            "request %s: %s is dead or unreachable, trying another replica", request_id, dead
                        )
                        await self._take_out(dead, for_good=is_death(error))
                    elif isinstance(cause_of(error), VersionNotServed):
                        # It left the rotation after the list of replicas was made.
                        await self._avoid(self.server_of[request_id])
                    elif NONE_LEFT not in str(cause_of(error)):
                        raise
                    if deaths == DEATHS or not await self._any_replica_serves():
                        raise self._last_death or error from error
        except asyncio.CancelledError:
            if request_id in self._asked:
                server, name = self._asked[request_id]
                server.give_up.remote(name)
            raise
        finally:
            self.server_of.pop(request_id, None)
            self._asked.pop(request_id, None)

    async def _send(self, request_id: str, **kwargs: Any) -> TokenOutput:
        while True:
            # If its connection ends, ask again through Ray, which knows whether the replica is dead.
            with suppress(ConnectionLost):
                return await super().generate(request_id, **kwargs)

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, ray.actor.ActorHandle]:
        found = await self._route(request_id)
        server, handle = found or await super()._acquire_server(request_id, **extra)
        self.server_of[request_id] = server
        self._asked[request_id] = (handle, "")
        return server, self._direct.of(server, handle)

    async def _route(self, request_id: str) -> tuple[str, ray.actor.ActorHandle] | None:
        """Choose a replica here; return None if verl's balancer has to decide."""
        if self._router is None:
            return None
        self._refresh_if_old()
        if not self._router.servers and self._asking is not None:
            await within(
                asyncio.shield(self._asking),
                ASK_S,
                owner="an agent loop",
                what="the balancer to name the replicas",
            )
        if self._router is None:
            return None
        if self._router.full and self._following is None:
            self._following = asyncio.create_task(self._follow(), name="follow replicas")
        return await self._router.acquire(request_id, current_episode().admitted)

    async def _follow(self) -> None:
        """Notice replicas that join while requests wait for room."""
        try:
            while self._router is not None and self._router.waiting:
                # Polling is necessary: the balancer does not notify.
                await asyncio.sleep(REFRESH_S)
                self._refresh_if_old()
        finally:
            self._following = None

    def _refresh_if_old(self) -> None:
        if asyncio.get_running_loop().time() - self._known_since >= REFRESH_S and self._asking is None:
            self._asking = asyncio.create_task(self._refresh(), name="refresh replicas")

    async def _refresh(self) -> None:
        """Update the list of replicas. If the balancer fails now, the next call that needs it raises."""
        try:
            answer = self._load_balancer.__ray_call__.remote(servers_of)
            servers = await within(
                answer, ASK_S, owner="an agent loop", what="the balancer to name the replicas"
            )
            if servers is None:
                if self._router is not None:
                    self._router.update({})
                self._router = None
            elif self._router is not None:
                self._router.update(servers)
        except (RayError, WaitTimeout) as error:
            logger.warning("the balancer did not name the replicas: %s", error)
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
        """Take a dead server out of the rotation.

        One that is only unreachable, as every server of a lost node is before Ray knows, is left out
        until the next refresh; the trainer finds out whether it is dead.
        """
        if self._router is not None:
            if not for_good:
                await self._avoid(dead)
                return
            self._router.remove(dead)
        removed = self._load_balancer.remove_servers.remote([dead])
        await within(removed, ASK_S, owner="an agent loop", what=f"the balancer to remove {dead}")

    async def _avoid(self, server: str) -> None:
        """Leave a server out until the next refresh, which this waits for if there is no other one."""
        if self._router is not None:
            self._router.remove(server)
        await asyncio.sleep(0 if self._router is not None and self._router.servers else REFRESH_S)

    async def _any_replica_serves(self) -> bool:
        """Wait for a serving replica; return False if none returned in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + float(self.config.trainer.v1.async_pipeline.faults.wait_timeout_s)
        while True:
            asked = self._load_balancer.get_all_servers.remote()
            if await within(asked, ASK_S, owner="an agent loop", what="the balancer to name the replicas"):
                if self._router is not None and not self._router.servers:
                    await self._refresh()
                return True
            if loop.time() >= deadline:
                return False
            # Polling is necessary: the balancer does not notify.
            await asyncio.sleep(REFRESH_S)


def refuses_request(error: Exception) -> bool:
    """Return whether the engine refuses only this request, such as an empty prompt."""
    return any(cls.__name__ in REFUSALS for cls in type(cause_of(error)).__mro__)


def is_death(error: Exception) -> bool:
    """Return whether the server's process or its engine died."""
    return isinstance(error, ActorDiedError) or type(cause_of(error)).__name__ == ENGINE_DEAD
