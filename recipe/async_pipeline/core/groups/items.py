# SPDX-License-Identifier: Apache-2.0
"""Items on the edges of the pipeline: keys, versions and metrics. Tensors stay in the sample store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple


class TokenSpan(NamedTuple):
    """Tokens of a response that `version` wrote: from `start` until the next span.

    A response is a sequence of spans. Files, the ledger and verl's fields have them as pairs of numbers.
    """

    version: int
    start: int


def spans_of(pairs: Iterable[Sequence[int]]) -> tuple[TokenSpan, ...]:
    """Return the spans of pairs of numbers."""
    return tuple(TokenSpan(int(version), int(start)) for version, start in pairs)


def plain(pairs: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Return the spans of pairs of numbers for what is kept of tens of thousands of responses: the garbage
    collector does not visit plain tuples of numbers again, but it visits a `TokenSpan` each time.
    """
    return tuple((int(version), int(start)) for version, start in pairs)


def pairs_of(spans: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return spans as pairs of numbers."""
    return [list(span) for span in spans]


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Permission to draw prompts."""

    step: int
    """The optimizer step that the first of these prompts is drawn for."""
    prompts: int
    version: int
    """The oldest version that any replica served when the admission was issued."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, for which `n` responses are generated."""

    uid: str
    step: int
    """The optimizer step that this prompt was drawn for."""
    kept_tokens: int = 0
    """Tokens of its responses that an earlier process generated and that are not generated again."""
    payload: Any = None
    """Opaque to the core: what the trainer needs to generate, with the responses of an earlier process."""


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """The prompts admitted together."""

    step: int
    prompts: tuple[Prompt, ...]
    admitted_version: int
    """The oldest version that any replica served when the batch was admitted."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One finished response.

    The agent loop's worker makes it, the trainer adds what only it knows, and it stays the same object until
    its step is trained; checkpoints hold it as it is. Its tokens stay in the sample store, under `key`.
    """

    key: str
    first_version: int
    """Version that generated its oldest span."""
    last_version: int
    num_tokens: int
    spans: tuple[tuple[int, int], ...] | None = None
    """`(version, start)` of each span: the version generated the response from position `start` on, up to the
    next span. Positions count all tokens of the response, tokens of tools included. None: unknown.
    """
    masked_before: int = 0
    """Tokens of versions before this one are not trained; see `token_ages`."""
    turns: int | None = None
    """Turns that the policy wrote: requests, one answer each. None: unknown."""
    seconds: float | None = None
    """From the request for its group until the group was finished."""
    reward: float | None = None
    filter_by: float | None = None
    """The value that group filtering compares; None if the run does not filter."""
    model_s: float | None = None
    """Seconds of its episode with an open request to the policy. None: unknown."""
    env_s: float | None = None
    """Seconds of its episode without one: tools, environments, and the agent's own code. None: unknown."""
    end: str = "done"
    """How its episode ended; see `agents.episodes`."""
    attempts: int = 1
    """How often its episode was played."""
    payload: Any = None
    """Opaque to the core: the tag of its sample in the store."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt with its finished trajectories."""

    uid: str
    step: int
    trajectories: tuple[Trajectory, ...]
    """At least one, unless there is a flaw."""
    source: str = ""
    """The data source of its prompt, as the data names it."""
    flaw: str = ""
    """Why it cannot be trained; empty if it can. The sample store does not hold flawed groups."""
    again: bool = False
    """Generate its responses again because of the flaw."""
    recalls: int = 0
    """How often its responses were given up and generated again, because it held up a step."""
    redundant: int = 0
    """Further episodes that were begun and ended, because enough others had finished."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What happened in its episodes, by name; see `agents.episodes.COUNTS`."""
    took_ms: tuple[float, ...] = ()
    """What the gateway added to each request of its episodes, in ms."""
    taught: bool = False
    """Whether its teacher has read it: the sample store has the log-probs, unless the group has a flaw."""
    payload: Any = None
    """Opaque to the core: what the trainer needs to find its samples."""

    @property
    def first_version(self) -> int:
        return min(t.first_version for t in self.trajectories)


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """The groups that one optimizer step consumes, on their way from the join to that step."""

    step: int
    groups: tuple[Group, ...]
    payload: Any = None
    """Opaque to the core: the trainer's handle to its tensors."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    timing_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def first_version(self) -> int:
        return min(g.first_version for g in self.groups)

    @property
    def num_trajectories(self) -> int:
        return sum(len(g.trajectories) for g in self.groups)

    def merged(self, *others: StepBatch) -> StepBatch:
        """Return this batch with the metrics and timings of its siblings from parallel stages."""
        metrics, timing = dict(self.metrics), dict(self.timing_s)
        for other in others:
            metrics.update(other.metrics)
            timing.update(other.timing_s)
        return replace(self, metrics=metrics, timing_s=timing)

    def with_results(
        self, *, payload: Any = None, metrics: Mapping[str, Any] | None = None, **timing_s: float
    ) -> StepBatch:
        """Return a copy with the results of one stage."""
        return replace(
            self,
            payload=self.payload if payload is None else payload,
            metrics={**self.metrics, **(metrics or {})},
            timing_s={**self.timing_s, **timing_s},
        )


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What loading one weight version cost: one engine rank, one replica, or all replicas added up.

    An engine rank fills in what it measured; its replica adds the rest.
    """

    transfer_s: float = 0.0
    """Until the verified version was in memory of the replica's host."""
    load_s: float = 0.0
    """From there until it was served, without the wait for a turn."""
    commit_s: float = 0.0
    """The part of `load_s` after the preparation, for which replicas take turns."""
    stall_s: float = 0.0
    """The part of `commit_s` during which the replica was blocked."""
    prove_s: float = 0.0
    """The part of `stall_s` that the verification took."""
    busy_s: float = 0.0
    """Seconds with open requests since the replica's previous load."""
    tensors_proved: int = 0
    elements_served: int = 0
    elements_explained: int = 0
    """Served elements whose place the engine's own tables of names and shards confirm."""
    unexplained: str = ""
    """The first published tensors that these tables do not explain."""
    tokens_read_again: int = 0
    """Tokens of stopped requests that the engine has to process a second time."""

    @property
    def explained_share(self) -> float | None:
        """The share of the served elements that the engine's tables explain, or None without a load."""
        return self.elements_explained / self.elements_served if self.elements_served else None

    @classmethod
    def total(cls, reports: Iterable[LoadReport]) -> LoadReport:
        """Return the sum of each figure over `reports`, and the first text."""
        made = list(reports)
        figures = {
            f.name: sum(getattr(report, f.name) for report in made)
            for f in fields(LoadReport)
            if f.name != "unexplained"
        }
        named = next((report.unexplained for report in made if report.unexplained), "")
        return cls(**figures, unexplained=named)


@dataclass(frozen=True, kw_only=True)
class Publication(LoadReport):
    """One weight update: its loads added up over replicas, and what the trainer adds to that."""

    version: int
    num_bytes: int
    gather_s: float
    replicas: int
    failure: str = ""
    """Which replicas were fenced during it, and why; empty if every replica took the version."""


# Keys of responses, `uid_session_index`: an episode has one for each conversation; the last is scored.
def last_keys(keys: Iterable[str]) -> set[str]:
    """Return the key of the last response of each episode."""
    found = set(keys)
    return {key for key in found if _following(key) not in found}


def episode_of(key: str) -> str:
    """Return what the keys of an episode have in common; a key of another form is an episode by itself."""
    episode, _, index = key.rpartition("_")
    return episode if index.isdecimal() else key


def _following(key: str) -> str:
    """Return the key of the next response of the same episode, or an empty text for other keys."""
    episode, _, index = key.rpartition("_")
    return f"{episode}_{int(index) + 1}" if index.isdecimal() else ""
