# SPDX-License-Identifier: Apache-2.0
"""The agent loop `agent_session`: a program plays the episode, and reaches the policy over HTTP.

    row ─► session, two keys ─► agent ──HTTP──► gateway of this process ─► session ─► engines
             ended, also at a limit ─► verify ─► reward                └─ chains ─► rows of training

The gateway is part of the agent loop worker: from here, requests take the way of any agent loop, with
versions, transcripts, recall and replicas that may die. A session has one row for each of its conversations;
the row of the last answer of the main one is scored.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from ....agents.episodes import DONE, REDUNDANT
from ....agents.processes.commands import LeftBehind, OutputLog
from ....agents.processes.sandbox import Folder, Sandbox, reason_without
from ....agents.runners import AgentSpec, Policy, Runner, Task, runner_of, verified
from ....config.checks.agent_program import hidden_paths
from ....config.knobs.agentic import EXTERNAL, AgenticConfig
from ....core.waits.deadline import EXPIRED
from ....errors import AgentFailed, ConfigError
from ....gateway.chains import ChainRow
from ....gateway.claims import Claims
from ....gateway.registry import Sessions
from ....gateway.sessions import RECALLED, Session, SessionLimits
from ...launch.light_verl import can_score
from ...launch.run_config import knobs_of
from ..episodes.environment_loop import RewardedTurns, plain, seed_of
from ..episodes.episode import END, NOTED, TOOK_MS, WHY, current_attempt, place_of
from ..tokens.version_spans import ROW_SPANS, ROW_TURNS
from .external_runner import AddressFile, ExternalRunner
from .session_policy import SessionPolicy

if TYPE_CHECKING:
    from ....gateway.server import GatewayServer

logger = logging.getLogger(__name__)
NAME = "agent_session"
MAX_IGNORED = 100
"""Names of parameters that the output tells at most."""
GRACE_S = 5.0
"""Seconds that an agent gets to end after its session has been ended, and again after it was stopped."""
CUT_OFF, LIMITS = "cut_off", ("turns", "tokens", "chains")
"""Limits of a session that are ends of an episode."""


class SessionSetup:
    """What all episodes of a worker process share."""

    def __init__(self, config: DictConfig) -> None:
        """Raises ConfigError if the config names no agent, or one that cannot be imported."""
        # The packages of the extra `agentic`, which other runs need not have.
        from ....gateway.app import Gateway
        from ....gateway.server import GatewayServer

        knobs = knobs_of(config).agentic
        if knobs.agent is None:
            raise ConfigError(f"the agent loop {NAME} requires {knobs.PATH}.agent; set it")
        rollout, gateway = config.actor_rollout_ref.rollout, knobs.gateway
        spec = self.spec = AgentSpec(
            agent=knobs.agent, verify=knobs.verify, env=knobs.variables(), sandbox=sandbox_of(config, knobs)
        )
        claims = Claims(gateway.lease_s) if knobs.agent == EXTERNAL else None
        self._claims = claims
        self._address = None if gateway.runners_dir is None else AddressFile(gateway.runners_dir)
        self.runner: Runner = runner_of(spec) if claims is None else ExternalRunner(claims)
        self.agent_may_reward, self.failure_reward = gateway.agent_may_reward, knobs.failure_reward
        self.limits = SessionLimits(
            prompt_tokens=int(rollout.prompt_length),
            response_tokens=int(rollout.response_length),
            max_turns=knobs.max_turns,
            max_chains=knobs.max_chains,
            main_model=gateway.main_model,
            auxiliary=gateway.auxiliary == "train",
            turn_rewards=knobs.turn_rewards,
        )
        self.seed = int(OmegaConf.select(config, "data.seed") or 0)
        self.tool_parser: str | None = OmegaConf.select(config, "actor_rollout_ref.rollout.multi_turn.format")
        self.closed_late = LeftBehind()
        """Agents that did not end in time."""
        self._ignored: set[str] = set()
        """Parameters of agents that the output has named."""
        self.to_play = asyncio.Semaphore(knobs.concurrency)
        self.sessions = Sessions()
        app = Gateway(
            self.sessions,
            claims=claims,
        ).app
        self._is_local = ipaddress.ip_address(gateway.host).is_loopback
        self._make_server = partial(GatewayServer, app, gateway.unix_dir, gateway.host)
        self._server: GatewayServer | None = None
        self._starting = asyncio.Lock()

    async def server(self) -> GatewayServer:
        """Return the server of the gateway, which the first call starts.

        Raises OSError if it cannot be started, or if its address cannot be written for runners; the next call
        tries it again.
        """
        async with self._starting:
            if self._server is None:
                server = self._make_server()
                try:
                    await server.start()
                    if self._address is not None and self._claims is not None:
                        await self._address.write(server.url, self._claims.key)
                except BaseException:
                    await server.stop()
                    raise
                if not self._is_local:
                    logger.warning("agents on other hosts reach the gateway at %s, unencrypted", server.url)
                self._server = server
        return self._server

    def incidents(self) -> dict[str, int]:
        """Return what could not be ended in time since the last call; see `agents.episodes.COUNTS`."""
        found = {"closed_late": self.closed_late.newly(), "left_behind": self.runner.left.newly()}
        return {name: count for name, count in found.items() if count}

    def name_ignored(self, names: Iterable[str]) -> None:
        """Log parameters of requests that have no effect, each once."""
        new = sorted({*names} - self._ignored)
        if new and len(self._ignored) < MAX_IGNORED:
            self._ignored.update(new)
            logger.warning(
                "requests of the agent have parameters without effect: %s; see docs/agents.md, Parameters",
                ", ".join(new),
            )

    async def stop(self) -> None:
        """Stop the gateway."""
        if self._address is not None:
            self._address.remove()
        if self._server is not None:
            await self._server.stop()


_setups: WeakKeyDictionary[asyncio.AbstractEventLoop, SessionSetup] = WeakKeyDictionary()


def sandbox_of(config: DictConfig, knobs: AgenticConfig) -> Sandbox | None:
    """Return the sandbox of the commands of a run, or None without one.

    Raises ConfigError if the run requires one, and this host has none.
    """
    if not knobs.has_commands or knobs.sandbox == "off":
        return None
    offline = knobs.sandbox == "offline"
    if reason := reason_without(offline):
        if knobs.sandbox != "auto":
            raise ConfigError(
                f"{knobs.PATH}.sandbox={knobs.sandbox} requires a sandbox on {platform.node()}, got none "
                f"({reason}); see docs/agents.md, Sandbox, or set it to auto or off"
            )
        logger.warning("agents run without a sandbox (%s); see docs/agents.md, Sandbox", reason)
        return None
    return Sandbox.of(hidden_paths(partial(OmegaConf.select, config), knobs), offline)


def setup_of(config: DictConfig) -> SessionSetup:
    """Return the setup of this process, made for its first episode."""
    loop = asyncio.get_running_loop()
    found = _setups.get(loop)
    if found is None:
        found = _setups[loop] = SessionSetup(config)
    return found


async def stop() -> None:
    """Stop the gateway of this process, if there is one."""
    found = _setups.pop(asyncio.get_running_loop(), None)
    if found is not None:
        await found.stop()


@register(NAME)
class AgentSessionLoop(AgentLoopBase):  # type: ignore[misc]
    """Plays one episode."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        """Return a response for each conversation of the agent, the main one with the last answer last.

        Raises AgentFailed, EnvironmentFailed if the reward cannot be determined, and WaitTimeout if a turn
        takes too long.
        """
        setup = setup_of(self.config)
        attempt = current_attempt()
        # The wait for a turn to play is not the episode's.
        with nullcontext() if attempt is None else attempt.excused():
            await setup.to_play.acquire()
        try:
            return await self._play(setup, sampling_params, row)
        finally:
            setup.to_play.release()

    async def _play(
        self, setup: SessionSetup, sampling_params: Mapping[str, Any], row: Mapping[str, Any]
    ) -> list[AgentLoopOutput]:
        policy = SessionPolicy(self, sampling_params, setup.tool_parser)
        log, attempt = OutputLog(), current_attempt()
        session = Session(policy, setup.limits, *(() if attempt is None else (attempt.seconds_left,)))
        setup.sessions.add(session)
        open_now = len(setup.sessions)
        if attempt is not None:
            attempt.log = log
        started, task = time.perf_counter(), task_of(row, setup.seed)
        with Folder() as folder:
            try:
                control = session.keys.control if setup.agent_may_reward else None
                server = await setup.server()
                unix_socket = None if server.unix_socket is None else str(server.unix_socket)
                reached = Policy(f"{server.url}/v1", session.keys.model, control, unix_socket)
                running = setup.runner.run(task, reached, folder, log)
                end, why, reward = await _ended(session, running, setup.closed_late)
            except asyncio.CancelledError as error:
                session.end(reason_of(error))
                raise
            finally:
                await session.close()
                setup.sessions.remove(session)

            setup.name_ignored(session.counts.ignored)
            rows = session.rows()
            if not rows:
                raise AgentFailed("the agent ended without an answer of the policy")
            rewarded: list[tuple[int, float]] = []
            if setup.spec.verify is not None:
                reward = await verified(setup.spec, folder, task, log, setup.runner.left)
            else:
                reward = reward if session.reward is None else session.reward
                rewarded = session.turn_rewards.placed(rows[-1], reward)
                if reward is None and not rewarded:
                    # In a thread: the first call for a data source imports verl's function for it.
                    scores = await asyncio.to_thread(can_score, self.config, row.get("data_source"))
                    reward = None if scores else without_reward(end, setup.failure_reward)
        seconds = time.perf_counter() - started
        spent = {
            "generate_sequences": policy.generate_s,
            "tool_calls": max(0.0, seconds - policy.generate_s),
            "num_preempted": -1,
        }
        outputs = [output_of(one, spent, rewarded, policy.shown(one.pictures)) for one in rows]
        outputs[-1].reward_score = sum(one for _, one in rewarded) if rewarded else reward
        outputs[-1].extra_fields.update(
            {
                END: end,
                WHY: why,
                NOTED: {**counts_of(session), **setup.incidents(), "open_sessions": open_now},
                TOOK_MS: session.took_ms,
            }
        )
        return outputs


def without_reward(end: str, failure_reward: float) -> float:
    """Return the reward of an episode that nothing scores. Raises AgentFailed if the agent ended it."""
    if end != DONE:
        return failure_reward
    raise AgentFailed(
        "the agent gave no reward, and verl has no reward function for its data_source; return or print one, "
        "or set agentic.verify or reward.custom_reward_function.path"
    )


async def _ended(session: Session, running: Any, late: LeftBehind) -> tuple[str, str, float | None]:
    """Await an agent. Returns the end of its episode, why it failed at a limit, and its reward.

    Raises as `_unless_over`, and AgentFailed.
    """
    try:
        reward = await _unless_over(session, running, late)
    except AgentFailed as error:
        # An agent that does not expect its limits fails at them, which is the policy's fault.
        if session.limit_hit not in LIMITS or not session.chains.all:
            raise
        return session.limit_hit, str(error), None
    end = session.limit_hit if session.limit_hit in LIMITS else CUT_OFF if session.cut_off else DONE
    return end, "", reward


async def _unless_over(session: Session, running: Any, late: LeftBehind) -> float | None:
    """Await an agent. Raises the error that ended its session, if one did, and stops the agent then.

    `late` counts an agent that does not end in time.
    """
    task: asyncio.Task[float | None] = asyncio.ensure_future(running)
    is_late = False
    try:
        both: set[asyncio.Future[Any]] = {task, session.over}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and session.over.exception() is None:
            await asyncio.wait({task}, timeout=GRACE_S)
            is_late = not task.done()
        if session.over.done() and (error := session.over.exception()) is not None:
            raise error
        if task.cancelled():
            raise AgentFailed("the agent raised CancelledError, although nothing had cancelled it")
        return task.result() if task.done() else None
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_S)
        late.add(is_late or not task.done())


def reason_of(cancelled: asyncio.CancelledError) -> str:
    """Return why an episode was cancelled, as its agent reads it."""
    said = cancelled.args[0] if cancelled.args else None
    return said if said in (EXPIRED, REDUNDANT) else RECALLED


def counts_of(session: Session) -> dict[str, int]:
    """Return what happened in a session; see `agents.episodes.COUNTS`."""
    counts = session.counts
    return {
        "retries_coalesced": counts.coalesced,
        "constrained": counts.constrained,
        "params_overridden": counts.overridden,
        "retokenized": counts.tokenized_again,
        "undelivered": len(session.deliveries.lost()),
        "auxiliary": sum(not chain.main for chain in session.chains.all),
        **{f"rows_of_{reason}": count for reason, count in session.chains.reasons.items()},
    }


def task_of(row: Mapping[str, Any], run_seed: int) -> Task:
    """Return what an agent, and only `verify`, learns of a row."""
    info = plain(row.get("extra_info") or {})
    shown = {
        "messages": plain(list(row["raw_prompt"])),
        "seed": seed_of(info, place_of(row), run_seed),
        "task": info.get("task") or {},
    }
    hidden = {
        "extra_info": info,
        "data_source": row.get("data_source"),
        "reward_model": plain(row.get("reward_model") or {}),
    }
    return Task(shown, hidden)


def output_of(
    row: ChainRow,
    spent: Mapping[str, Any],
    rewarded: Sequence[tuple[int, float]] = (),
    pictures: Sequence[Any] = (),
) -> AgentLoopOutput:
    """Return one conversation for verl. `rewarded`: position and reward of each turn that has one."""
    made = partial(RewardedTurns, turn_rewards=list(rewarded)) if rewarded else AgentLoopOutput
    return made(
        prompt_ids=row.prompt_ids,
        response_ids=row.response_ids,
        response_mask=row.mask,
        response_logprobs=row.log_probs,
        multi_modal_data={"images": [*pictures]} if pictures else None,
        num_turns=2 * row.answers,
        metrics=dict(spent),
        extra_fields={
            ROW_SPANS: row.spans,
            ROW_TURNS: row.answers,
            "turn_scores": [reward for _, reward in rewarded],
            "tool_rewards": [],
            "reward_extra_info": {},
        },
    )
