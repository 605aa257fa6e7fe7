# SPDX-License-Identifier: Apache-2.0
"""Agent loops whose completion is pushed: one awaitable call per group instead of a polled table."""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from ray.exceptions import RayTaskError
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from ...agents.episodes import EpisodeRules
from ...checkpoint.hashed_file import FileEntry
from ...core.groups.bad_data import Flaw
from ...errors import RolloutError
from .. import replaced
from ..calls.control_calls import CONTROL, GIVE_UP, ControlCalls, control
from ..calls.direct_calls import Address, DirectCalls
from ..calls.ray_calls import say_if_restarted
from ..launch.run_config import knobs_of
from ..process.garbage import freeze_present_objects
from ..reward.responses import Response
from ..reward.worker import PlainCaller
from ..rules.diffusers_rules import draws_images
from ..store.sample_store import count_cores_once
from . import diffusion_loop, stored_sessions, teacher
from .episodes import environment_loop
from .episodes.episode import (
    Attempt,
    change_episode,
    current_attempt,
    current_episode,
    episode_with,
    kept_turns,
    taken_turns,
)
from .episodes.episode_attempts import Episodes
from .episodes.redundancy import Begun, first_sound
from .episodes.validation import OpenPrompts, Validated, failed_response
from .prompt_pictures import media_tokens, opened
from .responses import (
    Answered,
    GroupInProgress,
    ResponseSample,
    divided,
    finished_group,
    trajectory_of,
)
from .sample_checks import Checks, Scores, flaws_together, found_flaws, unusable_prompt
from .sessions import agent_session_loop
from .tokens import partial_rollouts
from .tokens.partial_rollouts import (
    NotedResponse,
    RecordedRequest,
    RecordingClient,
    Transcript,
    sampling_of,
    tokens_in,
    written_so_far,
)
from .tokens.prompt_tokens import tokenized_once
from .tokens.version_spans import add_fields, costs_of, times_of, waits_of

logger = logging.getLogger(__name__)
_StockWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__
"""Ray forbids inheriting from the actor class; this is the plain class under it."""
GIVE_UP_S = 10.0
"""Seconds that a worker gets to end the responses of a group."""


class PushAgentLoopWorker(ControlCalls, _StockWorker):  # type: ignore[misc]
    """verl's worker, plus `run_group`, which returns when the whole group is in the sample store."""

    reward_loop_worker_handles: list[Any] | None
    teacher_server_manager: Any
    """verl's, in a run with teachers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        replaced.apply("agent loops")
        say_if_restarted()
        super().__init__(*args, **kwargs)
        count_cores_once()
        if self.reward_loop_worker_handles is not None:
            self.reward_loop_worker_handles = [
                PlainCaller(worker) for worker in self.reward_loop_worker_handles
            ]
        knobs = knobs_of(self.config)
        policies = knobs.faults.bad_data.by_kind(knobs.reward.failure)
        self._checks = Checks(policies, self.rollout_config.prompt_length, media_tokens(self.processor))
        refusing = {
            "refuse_long": self._checks.refusing_long_prompts,
            "refuse_pictures": self._checks.refusing_pictures,
            "tokenize": lambda stock: self._checks.refusing_unusable_prompts(tokenized_once(stock)),
        }
        replaced.apply("unusable prompts", **refusing)
        agentic = knobs.agentic
        rules = EpisodeRules.of(agentic.attempts, agentic.ends)
        self._episodes = Episodes(rules, agentic.episode_timeout_s, agentic.failure_reward)
        replaced.apply("tools", timeout_s=agentic.tool_timeout_s)
        self._redundancy = agentic.redundancy
        self._scores = Scores(knobs.reward.failure, knobs.reward.default)
        # Read for each response, for which a config is too slow.
        self._scores_at_once = knobs.reward.while_generating
        self._draws_images = draws_images(self.config)
        self._saves = self.config.trainer.save_freq > 0
        self._sampling = sampling_of(self.config.actor_rollout_ref.rollout)
        self._stores_rows = self.config.transfer_queue.backend.storage_backend == "SimpleStorage"
        self._groups: dict[str, GroupInProgress] = {}
        """By uid, in training; verl begins the prompts of validation."""
        self._resumed: dict[str, Sequence[Sequence[RecordedRequest]]] = {}
        """What an earlier process generated for prompts that have not begun in this one, by uid."""
        self._noted: dict[str, Sequence[NotedResponse]] = {}
        self._validated = OpenPrompts()
        self._direct = DirectCalls(run_group=self.run_group)
        freeze_present_objects()

    async def direct_address(self) -> Address:
        """Return where the trainer sends groups without Ray if it is on this host."""
        return await self._direct.address()

    async def run_validation(self, batch: Any) -> Validated:
        """Generate, score and store responses to a batch of verl's; returns when all prompts have ended."""
        return await self._validated.until_ended(batch["uid"], self.generate_sequences(batch))

    async def run_group(
        self, prompt: dict[str, Any], admitted: int | None = None, stored: dict[str, Any] | None = None
    ) -> Answered:
        """Generate and score n responses to one prompt, on replicas that serve at least version `admitted`.

        `stored`: the row of a prompt with pictures, to which the caller has a reference.

        Raises what the rollout server or the reward function raised. An episode whose agent loop fails is
        repeated; see `episode_attempts`.
        """
        self.serve_control_calls()
        change_episode(admitted=admitted)
        uid = str(prompt["uid"])
        # Once: a further attempt means that the responses were discarded.
        group = self._groups[uid] = GroupInProgress(before=self._resumed.pop(uid, ()))
        # As verl's `generate_sequences` does for a batch of prompts, whose columns take longer to separate
        # than all of this.
        prompt = {**(stored or {}), **prompt}
        row = {"agent_name": self.rollout_config.agent.default_agent_loop, **prompt}
        number = {"step": prompt["global_steps"], "sample_index": prompt["index"], "rollout_n": 0}
        task = asyncio.create_task(
            self._run_prompt(row, dict(self._sampling), trajectory={**number, "validate": False})
        )
        self.background_tasks.add(task)
        task.add_done_callback(self.background_tasks.discard)
        try:
            return await asyncio.shield(group.answered)
        except asyncio.CancelledError:
            # The caller is gone.
            task.cancel()
            raise
        finally:
            del self._groups[uid]

    async def ask_teacher(self, keys: Sequence[str]) -> list[Flaw]:
        """Store what the teacher says of finished responses; returns what is wrong with it."""
        return await teacher.ask(self.teacher_server_manager, keys, as_rows=self._stores_rows)

    @control(CONTROL)
    async def note_transcripts(self, uids: Sequence[str]) -> None:
        """Keep what was generated so far for these prompts until it is written; see `partial_rollouts`.

        Others that an earlier process had begun are forgotten: they are settled.
        """
        wanted = set(uids)
        open_ = [
            one
            for uid, group in self._groups.items()
            if uid in wanted
            for each in group.transcripts
            for one in each.open.values()
        ]
        found = await written_so_far(open_)
        self._resumed = {uid: before for uid, before in self._resumed.items() if uid in wanted}
        self._noted = {
            **{uid: [Transcript(one).noted({}) for one in before] for uid, before in self._resumed.items()},
            **{uid: group.noted(found) for uid, group in self._groups.items() if uid in wanted},
        }

    @control(CONTROL)
    async def write_transcripts(self, version: int, root: str, shard: str) -> list[FileEntry]:
        """Write what was noted, and is not newer than a version, into a checkpoint. Returns the files."""
        noted, self._noted = self._noted, {}
        return await asyncio.to_thread(partial_rollouts.write, root, shard, noted, version)

    async def resume(self, checkpoint: str, shards: Sequence[str]) -> dict[str, int]:
        """Take the prompts of shards, which are then sent to this worker. Returns their numbers of tokens."""
        self._resumed |= await asyncio.to_thread(partial_rollouts.read, checkpoint, shards)
        return {uid: tokens_in(before) for uid, before in self._resumed.items()}

    @control(GIVE_UP)
    async def give_up(self, uid: str) -> None:
        """Abort a group, including its requests on the rollout servers. Ignores a group that is not
        in generation.

        `run_group` tells whether the group was stored: a group whose storing has begun is stored and
        returned whole; otherwise nothing of it is in the sample store.
        """
        group = self._groups.get(uid)
        if group is None:
            return
        if group.task is None:
            group.is_given_up = True
            return
        if not group.is_stored:
            group.task.cancel()
        # A task that does not end by then is abandoned, and so is its caller.
        await asyncio.wait([group.task], timeout=GIVE_UP_S)

    @control(CONTROL)
    async def close(self) -> None:
        """End what the episodes of this process share: the gateway, and environments that play none."""
        await agent_session_loop.stop()
        await environment_loop.stop()

    async def _run_prompt(
        self,
        prompt: dict[str, Any],
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        trace: bool = False,
    ) -> None:
        group = self._groups.get(prompt["uid"])
        if group is None:  # verl begins the prompts of validation
            with self._validated.answering(prompt["uid"]):
                prompt = await opened(prompt)
                await super()._run_prompt(prompt, sampling_params, trajectory, trace)
            return
        if group.is_given_up:
            group.answered.set_result(None)
            return
        group.task = asyncio.current_task()
        try:
            group.answered.set_result(await self._answer(group, prompt, sampling_params, trajectory, trace))
        except asyncio.CancelledError:
            group.answered.set_result(None)
        except Exception as error:  # noqa: BLE001 - handed to the caller as it is
            group.answered.set_exception(error)
        finally:
            group.task, group.episodes = None, []

    async def _answer(
        self,
        group: GroupInProgress,
        prompt: dict[str, Any],
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        trace: bool,
    ) -> Answered:
        """Generate the responses of a group, and store them if it is to be trained."""
        try:
            prompt = await opened(prompt)
        except Exception as error:  # noqa: BLE001 - of Pillow, which raises many
            return finished_group(prompt, [], [unusable_prompt(error)], [], [])
        n = prompt.pop("__rollout_n__", self.config.actor_rollout_ref.rollout.n)
        params = dict(sampling_params)
        if not prompt.pop("__do_sample__", True):
            params.update(top_p=1.0, top_k=-1, temperature=0)
        before, recorded = group.before, self._saves or bool(group.before)
        episodes = group.episodes = [
            Begun(Transcript(before[i] if i < len(before) else ()) if recorded else None)
            for i in range(n + self._redundancy)
        ]
        sessions = [
            asyncio.create_task(
                self._session(episode, params, trajectory=trajectory, trace=trace, session_id=i, **prompt)
            )
            for i, episode in enumerate(episodes)
        ]
        usable = self._checks.usable
        chosen = await self._settled(prompt["uid"], sessions, n, lambda i: usable(episodes[i].flaws))
        samples, redundant = divided(group.finished, chosen, episodes)
        flaws = flaws_together(n, [episodes[i].flaws for i in chosen], [one.fields for one in samples])
        if usable(flaws):
            if samples and self._draws_images:
                rows = {one.trajectory.key: one.fields for one in samples}
                await diffusion_loop.share_conditions(self.llm_client, prompt, rows)
            group.is_stored = True
            await stored_sessions.put_group(samples, as_rows=self._stores_rows)
        return finished_group(prompt, samples, flaws, redundant, episodes)

    async def _settled(
        self, uid: str, sessions: list[asyncio.Task[None]], n: int, is_sound: Callable[[int], bool]
    ) -> Collection[int]:
        """Wait for the sessions of a group; returns the numbers of its members.

        Those are n, or all of them if fewer are sound. Raises the first error of a session.
        """
        chosen: Collection[int] = range(len(sessions))
        if len(sessions) > n:
            chosen = await first_sound(sessions, n, is_sound) or chosen
        # All settle first, so that no sibling writes after the group was declared failed.
        settled = await asyncio.gather(*(sessions[i] for i in chosen), return_exceptions=True)
        for result in settled:
            if isinstance(result, Exception):
                raise result
            if isinstance(result, BaseException):
                raise RolloutError(f"a response of group {uid} was cancelled") from result
        return chosen

    async def _compute_teacher_logprobs(self, output: Any, *args: Any, **kwargs: Any) -> None:
        """Ask the teacher about a response with pictures, of which the sample store keeps the inputs of the
        trained model alone; the stage `teacher` asks about others once their group is finished.
        """
        if output.multi_modal_data:
            await super()._compute_teacher_logprobs(output, *args, **kwargs)

    async def _compute_score(self, outputs: list[Any], kwargs: dict[str, Any]) -> None:
        """Score as verl does, unless the batch is scored after generation.

        A response without a score gets the default or ends the run, as `reward.failure` says.
        """
        if not self._scores_at_once and not current_episode().validates:
            return
        failed = None
        try:
            await self._request_score(outputs, kwargs)
        except RayTaskError as error:
            failed = self._scores.failed(error)
        self._scores.settle(outputs[-1], failed)

    async def _request_score(self, outputs: list[Any], kwargs: dict[str, Any]) -> None:
        """Do what verl's `_compute_score` does, without its tensors."""
        workers, last = self.reward_loop_worker_handles, outputs[-1]
        if self.processor is not None or workers is None or last.reward_score is not None:
            await super()._compute_score(outputs, kwargs)
            return
        begun = time.perf_counter()
        result = await random.choice(workers).score(Response.of(outputs, kwargs))
        last.reward_score = result["reward_score"]
        last.extra_fields["reward_extra_info"] = result["reward_extra_info"]
        last.metrics.compute_score = time.perf_counter() - begun

    async def _session(self, episode: Begun, *args: Any, **kwargs: Any) -> None:
        """Play one response; what is wrong with it is added to its flaws. Raises as `run_group`."""
        worker, transcript, flaws = self, episode.transcript, episode.flaws
        if transcript is not None:
            # verl hands the worker's client to the agent loop, and this response needs a separate one.
            worker = copy.copy(self)
            worker.llm_client = RecordingClient(self.llm_client, transcript)

        async def play(attempt: int) -> None:
            if attempt > 1:
                flaws.clear()
                if transcript is not None:
                    transcript.forget()
            change_episode(began=time.perf_counter(), cost={})
            with kept_turns() as episode.turns, found_flaws(flaws):
                await worker._run_agent_loop(*args, **kwargs)

        name = f"{kwargs.get('uid')}_{kwargs['session_id']}"
        flaws += await self._episodes.play(play, name, episode.failed.append)

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any
    ) -> None:
        """Play a response as verl does; in validation, with the ends and attempts of training."""
        begin = partial(super()._run_agent_loop, sampling_params, trajectory, **kwargs)
        if not trajectory["validate"]:
            await begin()
            return
        attempts: list[Attempt] = []

        async def play(number: int) -> None:
            if (attempt := current_attempt()) is not None:
                attempts.append(attempt)
            with kept_turns():
                await begin()

        key = f"{kwargs['uid']}_{kwargs['session_id']}"
        # Agent loops are not told by verl.
        with episode_with(validates=True):
            flaws = await self._episodes.play(play, key, self._validated.attempt_failed)
            if not flaws:
                return
            logger.warning("validation: %s; it counts as agentic.failure_reward", flaws[0].why)
            await self._agent_loop_postprocess(
                failed_response(self.tokenizer, self._episodes.limits.failure_reward), True, **kwargs
            )
        self._validated.failed(f"{key}_0", self._episodes.limits.failure_reward, attempts[-1])

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        """Process the output as verl does, and record the turns and their versions."""
        outputs = output if isinstance(output, list) else [output]
        attempt = current_attempt()
        if validate:
            self._checks.refuse_misplaced(outputs, f"{kwargs['uid']}_{kwargs['session_id']}")
        if attempt is not None:
            attempt.returned(outputs)
        turns = taken_turns()
        add_fields(outputs, turns)
        names = [f"{kwargs['uid']}_{kwargs['session_id']}_{i}" for i in range(len(outputs))]
        if not all([self._checks.passes(name, one, turns) for name, one in zip(names, outputs, strict=True)]):
            return
        ended, episode = time.perf_counter(), current_episode()
        cost = episode.cost
        if cost is not None:
            cost.update(costs_of(turns, ended - episode.began))
            change_episode(times=times_of(turns, episode.began))
            if attempt is not None and turns:
                change_episode(waits=waits_of(turns, episode.began, ended, attempt.waited_s))
        diffusion_loop.take_columns(outputs)
        with stored_sessions.stored_by(self._store_trajectories):
            await super()._agent_loop_postprocess(output, validate, **kwargs)
        if cost is not None:
            cost["score_s"] = time.perf_counter() - ended

    async def _store_trajectories(
        self, keys: list[str], fields: list[dict[str, Any]], tags: list[dict[str, Any]], partition_id: str
    ) -> None:
        """Collect the responses of a session: one put per group costs a fraction of a put per session."""
        diffusion_loop.add_columns(fields)
        group, episode = self._groups.get(fields[0]["uid"]), current_episode()
        attempt = episode.attempt
        if group is None and attempt is not None and not episode.validates:
            raise RolloutError(f"group {fields[0]['uid']} was given up before {keys[0]} was finished")
        if group is None:
            await stored_sessions.put(keys, fields, tags, partition_id)
            if attempt is not None:
                self._validated.note(keys[-1], fields, attempt)
        else:
            assert attempt is not None, "training repeats episodes"
            fields = stored_sessions.storable_rows(fields)
            group.finished += [
                ResponseSample(
                    trajectory_of(key, values, tag, attempt, episode.waits),
                    values,
                    partition_id,
                    episode.cost or {},
                    episode.times,
                )
                for key, values, tag in zip(keys, fields, tags, strict=True)
            ]
            last = group.finished.pop()
            group.finished.append(last._replace(counts=attempt.counts, took_ms=attempt.took_ms))
