# SPDX-License-Identifier: Apache-2.0
"""Validation in an agent loop worker: one call that ends when all its prompts have ended.

verl's call returns as soon as the prompts have begun. If the process dies afterwards, nothing reports that,
and the trainer waits for responses that never come. Ray repeats a call that lasts, in the restarted process,
and raises an error once it does not restart the process any more.

Episodes are repeated as in training. One that fails in its last attempt counts with `failure_reward`: without
it, validation would measure the episodes that did not fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import transfer_queue as tq
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from ....core.groups.items import Group, Trajectory
from ....observe.run_directory.agent_output import FailedAttempt
from ..responses import reward_of
from ..tokens.version_spans import TURNS
from .episode import Attempt

PARTITION = "val"
"""verl's partition of the sample store for validation."""


class Validated(NamedTuple):
    """What became of prompts that were validated."""

    episodes: list[Group]
    """Each as a group."""
    failed: list[FailedAttempt]


class OpenPrompts:
    """Prompts of this process that are validated."""

    def __init__(self) -> None:
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._found: dict[str, Validated] = {}

    async def until_ended(self, uids: Collection[str], begin: Awaitable[object]) -> Validated:
        """Await `begin`, which starts a task for each prompt, and the ends of these tasks.

        Removes what an earlier process has stored for the prompts. Raises the first error of a task.
        """
        await _clear_responses(uids)
        loop = asyncio.get_running_loop()
        ends = {uid: loop.create_future() for uid in uids}
        self._ends.update(ends)
        try:
            await begin
            await asyncio.gather(*ends.values())
        finally:
            found = [self._found.pop(uid) for uid in uids if uid in self._found]
            for uid in uids:
                self._ends.pop(uid, None)
        return merged(found)

    def note(self, key: str, rows: Sequence[Mapping[str, Any]], attempt: Attempt) -> None:
        """Note an episode, whose last response has this key. `rows`: the fields of its responses."""
        told = [row.get("extra_fields") or {} for row in rows]
        turns = [one[TURNS] for one in told if one.get(TURNS) is not None]
        self._note(key, attempt, reward_of(rows[-1]), sum(turns) if turns else None)

    def failed(self, key: str, reward: float, attempt: Attempt) -> None:
        """Note an episode that failed in this attempt, its last one, and counts with this reward."""
        self._note(key, attempt, reward, None)

    def attempt_failed(self, attempt: FailedAttempt) -> None:
        """Note an attempt at an episode."""
        self._of(attempt.episode).failed.append(attempt)

    def _of(self, key: str) -> Validated:
        return self._found.setdefault(key.split("_")[0], Validated([], []))

    def _note(self, key: str, attempt: Attempt, reward: float | None, turns: int | None) -> None:
        episode = Trajectory(
            key=key,
            first_version=0,
            last_version=0,
            num_tokens=0,
            turns=turns,
            reward=reward,
            end=attempt.end,
            attempts=attempt.number,
        )
        group = Group(uid=key, step=0, trajectories=(episode,), counts=attempt.counts)
        self._of(key).episodes.append(group)

    @contextmanager
    def answering(self, uid: str) -> Iterator[None]:
        """Enter for as long as the task of a prompt runs."""
        raised: BaseException | None = None
        try:
            yield
        except BaseException as error:
            raised = error
            raise
        finally:
            end = self._ends.get(uid)
            if end is not None and not end.done():
                if raised is None:
                    end.set_result(None)
                else:
                    end.set_exception(raised)


def merged(parts: Iterable[Validated]) -> Validated:
    """Return parts of a validation as one."""
    found = Validated([], [])
    for one in parts:
        found.episodes.extend(one.episodes)
        found.failed.extend(one.failed)
    return found


def failed_response(tokenizer: Any, reward: float) -> AgentLoopOutput:
    """Return a response of one token, for an episode that has none."""
    end = int(tokenizer.eos_token_id)
    return AgentLoopOutput(
        prompt_ids=[end],
        response_ids=[end],
        response_mask=[1],
        reward_score=reward,
        num_turns=0,
        metrics={},
        extra_fields={"reward_extra_info": {}},
    )


async def _clear_responses(uids: Collection[str]) -> None:
    """Remove the stored responses of prompts: a conversation that an agent does not repeat would stay."""
    stored = (await tq.async_kv_list(partition_id=PARTITION)).get(PARTITION, {})
    own = [key for key, tag in stored.items() if not tag.get("is_prompt") and key.split("_")[0] in uids]
    if own:
        await tq.async_kv_clear(keys=own, partition_id=PARTITION)
