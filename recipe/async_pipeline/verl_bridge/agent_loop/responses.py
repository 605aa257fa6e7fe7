# SPDX-License-Identifier: Apache-2.0
"""What an agent loop worker returns for a prompt: its group, and what the trainer reads once."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...agents.episodes import counted_together
from ...core.events import SLOWEST_TURNS
from ...core.groups.bad_data import Flaw
from ...core.groups.items import Group, Trajectory, plain
from ...errors import RolloutError
from ...observe.run_directory.agent_output import FailedAttempt
from ..store.sample_columns import TEACHER_LOG_PROBS
from .episodes.episode import Attempt
from .episodes.redundancy import Begun, Redundant
from .tokens.partial_rollouts import NotedResponse, RecordedRequest, Transcript
from .tokens.version_spans import TURNS, cost_columns


class ResponseSample(NamedTuple):
    """A response on its way into the sample store: its trajectory and the tensors that stay in the store."""

    trajectory: Trajectory
    """Its payload is the tag in the sample store."""
    fields: dict[str, Any]
    partition_id: str
    cost: dict[str, float]
    """See `version_spans.costs_of`."""
    times: Sequence[Sequence[float]] = ()
    """See `version_spans.times_of`."""
    counts: Mapping[str, int] = {}
    """What happened in its episode, of its last response only; see `agents.episodes.COUNTS`."""
    took_ms: Sequence[float] = ()
    """What the gateway added to each request of its episode, of its last response only."""


class GroupFacts(NamedTuple):
    """What the trainer reads once, as a group arrives.

    The group is kept until its step and is written into checkpoints, so it does not hold these.
    """

    flaws: Sequence[Flaw]
    """If a policy excludes a group with one of these from training, it is not in the sample store."""
    costs: Mapping[str, Any]
    """Fields of the event ANSWERED: a list for each figure, in the order in which responses finished, and
    start and seconds of each turn of the response that ended last if it has several.
    """
    reward_infos: Sequence[Mapping[str, Any]]
    """What the reward function returned besides the score, for each trajectory."""
    redundant: Sequence[Redundant] = ()
    """Further episodes, which the group did not need."""
    failed: Sequence[FailedAttempt] = ()
    """Attempts that failed, with what the agent wrote."""


Answered = tuple[Group, GroupFacts] | None
"""What a worker process returns for one prompt; None if the prompt was given up. The trajectories of the
group are the ones without a flaw; the trainer adds what only it knows.
"""


def _future() -> asyncio.Future[Answered]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class GroupInProgress:
    """A prompt whose responses this process generates."""

    answered: asyncio.Future[Answered] = field(default_factory=_future)
    """What the trainer's call waits for."""
    before: Sequence[Sequence[RecordedRequest]] = ()
    """What an earlier process generated for it, response by response."""
    finished: list[ResponseSample] = field(default_factory=list)
    episodes: list[Begun] = field(default_factory=list)
    """With a transcript each, except in runs that neither make checkpoints nor resume from one."""
    task: asyncio.Task[Any] | None = None
    """Generates the responses; None before it begins, and after its end."""
    is_given_up: bool = False
    """It was given up before its task began."""
    is_stored: bool = False
    """It is on its way into the sample store, and no longer given up."""

    @property
    def transcripts(self) -> list[Transcript]:
        return [one.transcript for one in self.episodes if one.transcript is not None]

    def noted(self, found: Mapping[str, RecordedRequest]) -> list[NotedResponse]:
        """Note its requests as they are now; see `Transcript.noted`."""
        return [one.noted(found) for one in self.transcripts or map(Transcript, self.before)]


def trajectory_of(
    key: str,
    fields: dict[str, Any],
    tag: dict[str, Any],
    attempt: Attempt,
    waits: tuple[float, float] | None = None,
) -> Trajectory:
    """Return the trajectory of a stored response. `waits`: see `version_spans.waits_of`.

    Raises RolloutError if the rollout did not record which versions generated the response.
    """
    first, last = tag["min_global_steps"], tag["max_global_steps"]
    if first is None or last is None:
        raise RolloutError(f"trajectory {key} came back without the version that generated it")
    told = fields.get("extra_fields") or {}
    spans = told.get("version_spans")
    return Trajectory(
        key=key,
        first_version=int(first),
        last_version=int(last),
        num_tokens=int(tag["response_len"]),
        spans=None if spans is None else plain(spans),
        turns=told.get(TURNS),
        reward=reward_of(fields),
        model_s=None if waits is None else round(waits[0], 6),
        env_s=None if waits is None else round(waits[1], 6),
        end=attempt.end,
        attempts=attempt.number,
        payload=tag,
    )


def reward_of(fields: Mapping[str, Any]) -> float | None:
    """Return the score in a stored row, or None if it has none."""
    # Zero but for the last token of the response, or of each turn; no such field without a score.
    scores = fields.get("rm_scores")
    return None if scores is None else float(np.sum(np.asarray(scores), dtype=np.float64))


def reward_info_of(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the reward function returned besides the score of a stored row."""
    return (fields.get("extra_fields") or {}).get("reward_extra_info") or {}


def finished_group(
    prompt: Mapping[str, Any],
    samples: Sequence[ResponseSample],
    flaws: Sequence[Flaw],
    redundant: Sequence[Redundant],
    episodes: Sequence[Begun],
) -> tuple[Group, GroupFacts]:
    """Return the group of a prompt. `episodes`: all that were begun."""
    ordered = sorted(samples, key=lambda one: one.trajectory.key)
    columns = [sorted(one.fields) for one in ordered]
    alike = all(one == columns[0] for one in columns)
    counts = counted_together(one.counts for one in samples)
    if again := sum(one.transcript.replayed for one in episodes if one.transcript is not None):
        counts["replayed_requests"] = again
    costs = cost_columns([one.cost for one in samples])
    turns = [one.times for one in samples if one.times]
    if turns:
        costs[SLOWEST_TURNS] = max(turns, key=lambda times: sum(times[-1]))
    group = Group(
        uid=str(prompt["uid"]),
        step=prompt["global_steps"],
        trajectories=tuple(one.trajectory for one in ordered),
        source=str(prompt.get("data_source") or ""),
        redundant=len(redundant),
        counts=counts,
        took_ms=tuple(took for one in samples for took in one.took_ms),
        taught=bool(samples) and all(TEACHER_LOG_PROBS in one.fields for one in samples),
        payload=columns[:1] if alike else columns,
    )
    infos = [reward_info_of(one.fields) for one in ordered]
    failed = [attempt for one in episodes for attempt in one.failed]
    return group, GroupFacts(flaws, costs, infos, redundant, failed)


def divided(
    samples: Sequence[ResponseSample], chosen: Collection[int], episodes: Sequence[Begun]
) -> tuple[list[ResponseSample], list[Redundant]]:
    """Return the samples of the chosen episodes of a group, and what is known of the others."""
    by_session: dict[int, list[ResponseSample]] = {}
    for sample in samples:
        by_session.setdefault(_session_of(sample), []).append(sample)
    redundant = [
        Redundant.finished([one.trajectory for one in by_session[i]], episode.seconds)
        if i in by_session
        else Redundant.cancelled(episode.turns, episode.seconds)
        for i, episode in enumerate(episodes)
        if i not in chosen
    ]
    return [one for one in samples if _session_of(one) in chosen], redundant


def _session_of(sample: ResponseSample) -> int:
    return int(sample.fields["session_id"])
