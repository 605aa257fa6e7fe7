# SPDX-License-Identifier: Apache-2.0
"""What an agent loop worker returns for a prompt: trajectories, and what the trainer reads of each once."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...agents.episodes import counted_together
from ...core.groups.bad_data import Flaw
from ...core.groups.items import Trajectory
from ...core.lag.token_spans import spans_of
from ...errors import RolloutError
from ...observe.run_directory.agent_output import FailedAttempt
from .episodes.episode import Attempt
from .episodes.redundancy import Begun, Redundant
from .tokens.partial_rollouts import NotedResponse, RecordedRequest, Transcript, WrittenSoFar
from .tokens.version_spans import TURNS


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


class Details(NamedTuple):
    """What the trainer reads once, as a response arrives.

    A trajectory is kept until its step and is written into checkpoints, so it does not hold these.
    """

    columns: list[str]
    """Names of its columns in the sample store."""
    cost: dict[str, float]
    reward_info: dict[str, Any]
    """What the reward function returned besides the score."""


class Answered(NamedTuple):
    """What a worker process returns for one prompt; empty if the prompt was given up."""

    trajectories: list[Trajectory]
    """Those without a flaw, in the order in which they finished; the trainer adds what only it knows."""
    details: list[Details]
    """One for each trajectory."""
    flaws: list[Flaw]
    """If a policy excludes a group with one of these from training, it is not in the sample store."""
    redundant: Sequence[Redundant] = ()
    """Further episodes, which the group did not need."""
    slowest_turns: Sequence[Sequence[float]] = ()
    """Start and seconds of each turn of the response that ended last; empty for single turns."""
    counts: Mapping[str, int] = {}
    """What happened in its episodes; see `agents.episodes.COUNTS`."""
    took_ms: Sequence[float] = ()
    """What the gateway added to each request of its episodes."""
    failed: Sequence[FailedAttempt] = ()
    """Attempts that failed, with what the agent wrote."""


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
    transcripts: list[Transcript] = field(default_factory=list)
    """One for each response; empty in runs that neither make checkpoints nor resume from one."""
    task: asyncio.Task[Any] | None = None
    """Generates the responses; None before it begins, and after its end."""
    is_given_up: bool = False
    """It was given up before its task began."""
    is_stored: bool = False
    """It is on its way into the sample store, and no longer given up."""

    def noted(self, found: Mapping[str, WrittenSoFar]) -> list[NotedResponse]:
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
    # Zero but for the last token of the response, or of each turn; no such field without a score.
    scores = fields.get("rm_scores")
    return Trajectory(
        key=key,
        first_version=int(first),
        last_version=int(last),
        num_tokens=int(tag["response_len"]),
        spans=None if spans is None else spans_of(spans),
        turns=told.get(TURNS),
        reward=None if scores is None else float(np.sum(np.asarray(scores), dtype=np.float64)),
        model_s=None if waits is None else round(waits[0], 6),
        env_s=None if waits is None else round(waits[1], 6),
        end=attempt.end,
        attempts=attempt.number,
        payload=tag,
    )


def details_of(sample: ResponseSample) -> Details:
    """Return what the trainer reads of a sample."""
    reward_info = (sample.fields.get("extra_fields") or {}).get("reward_extra_info") or {}
    return Details(columns=sorted(sample.fields), cost=sample.cost, reward_info=reward_info)


def slowest_turns(samples: Sequence[ResponseSample]) -> Sequence[Sequence[float]]:
    """Return the times of the turns of the response whose last turn ended last; empty without turns."""
    return max((one.times for one in samples if one.times), key=lambda times: sum(times[-1]), default=())


def counted(samples: Sequence[ResponseSample], replayed: Iterable[int]) -> dict[str, int]:
    """Return what happened in the episodes of a group. `replayed`: requests of each, see `Transcript`."""
    counts = counted_together(sample.counts for sample in samples)
    if again := sum(replayed):
        counts["replayed_requests"] = again
    return counts


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
