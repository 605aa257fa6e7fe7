# SPDX-License-Identifier: Apache-2.0
"""Flawed responses: what is wrong with them, what becomes of their group, and which replica wrote them.

    a response ─► flaws_of ──►┐                     ┌─► fail: the run ends and names the replica and version
    its group ──► flaws_of_group ──► BadData.judge ─┼─► drop: generated again, `attempts` times in all; then
                                                    │         the prompt is quarantined, its group failed,
                                                    │         and another prompt drawn
                                                    └─► keep: counted, and trained

Pure: takes plain numbers, imports neither verl nor ray nor torch.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from ...errors import BadDataError

NO_SCORE = "no_score"
"""The kind whose policy is a knob of the reward, `reward.failure`."""
OF_SCORES = {"fail": "fail", "drop": "drop", "score": "keep"}
"""Values of `reward.failure` as policies."""
UNUSABLE_PROMPT = "unusable_prompt"
"""The kind of a prompt that cannot be read from the data, or whose pictures cannot be shown to the model."""
HOPELESS = ("long_prompt", "teacher_logprobs")
"""Kinds that another attempt would only repeat."""
MANY_DROPPED = 64
"""Dropped groups from which their share of all groups is checked."""
SHOWN = 100
"""Quarantined prompts that the summary lists."""
KEPT_WRITERS = 1000
"""Writers with counts. A writer is a replica with a version, so new ones appear as long as a run lasts."""


@dataclass(frozen=True, kw_only=True)
class Policies:
    """What happens to a group whose data is bad, by kind: fail (the run ends and names the group and, where
    they are known, the replica and version that wrote it), drop (the prompt is generated again), or keep
    where the kind permits it. async_pipeline/bad_data/* counts each kind.
    """

    nonfinite_logprobs: Literal["fail", "drop"] = "fail"
    """The rollout returned NaN or infinity for the log-prob of a token: its replica computes wrong values."""
    empty_answer: Literal["drop", "fail"] = "drop"
    """A response has no token."""
    all_masked: Literal["drop", "fail", "keep"] = "drop"
    """The response mask of every response is 0, as where all are too long: only a KL term learns from it."""
    long_prompt: Literal["drop", "fail", "keep"] = "drop"
    """The prompt has more tokens than data.max_prompt_length. keep: verl cuts off its beginning."""
    unusable_prompt: Literal["drop", "fail"] = "drop"
    """A row is no prompt, or its pictures are broken, missing, too many or too large."""
    missing_answers: Literal["drop", "fail"] = "drop"
    """The agent loop returned nothing for a response, so the group is smaller than rollout.n."""
    failed_episode: Literal["drop", "fail"] = "drop"
    """An episode failed in all of its attempts; see agentic."""
    teacher_logprobs: Literal["fail", "drop"] = "fail"
    """The teacher of a distillation returned NaN for a response, or not one log-prob for each token."""

    def by_kind(self, reward_failure: str) -> dict[str, str]:
        """The policy of each kind. `reward_failure`: the value of `reward.failure`."""
        return {**asdict(self), NO_SCORE: OF_SCORES[reward_failure]}


POLICIES: Mapping[str, tuple[str, ...]] = {
    name: get_args(hint) for name, hint in get_type_hints(Policies).items()
}
"""The policies of each kind, the default first."""
KINDS = (*POLICIES, NO_SCORE)


class Flaw(NamedTuple):
    """Something wrong with a response or its group."""

    kind: str
    why: str
    writer: str = ""
    """The replica and version that wrote it, if this is known and matters."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}" + (f", written by {self.writer}" if self.writer else "")


def flaws_of(
    key: str,
    *,
    prompt_tokens: int,
    prompt_limit: int,
    response_tokens: int,
    logprobs: Sequence[Any] | None,
    writer: Callable[[int], str],
) -> list[Flaw]:
    """Return the flaws of one response. `logprobs` may be None; `writer` returns the writer of token i."""
    found = []
    if response_tokens == 0:
        found.append(Flaw("empty_answer", f"response {key} has no token", writer(0)))
    if prompt_tokens > prompt_limit:
        found.append(long_prompt(prompt_tokens, prompt_limit))
    bad = [i for i, value in enumerate(logprobs or ()) if not is_finite(value)]
    if bad:
        assert logprobs is not None
        why = (
            f"{len(bad)} of {len(logprobs)} log-probs of response {key} are not finite, the first "
            f"{logprobs[bad[0]]!r} at token {bad[0]}"
        )
        found.append(Flaw("nonfinite_logprobs", why, writer(bad[0])))
    return found


def flaws_of_group(
    *, expected: int, present: int, unmasked: Sequence[int], unscored: Collection[str]
) -> list[Flaw]:
    """Return the flaws of a group as a whole.

    `expected` responses were requested, `present` arrived, flawed ones included; `unmasked`: tokens that
    count, of each response without flaw; `unscored`: why some have no score.
    """
    found = []
    if present < expected:
        found.append(
            Flaw(
                "missing_answers",
                f"{expected - present} of {expected} responses are missing: the agent loop returned nothing",
            )
        )
    if unmasked and not any(unmasked):
        found.append(Flaw("all_masked", f"no token of its {len(unmasked)} responses counts"))
    return found + [Flaw(NO_SCORE, why) for why in unscored]


def long_prompt(tokens: int, limit: int) -> Flaw:
    return Flaw("long_prompt", f"the prompt has {tokens} tokens, and data.max_prompt_length is {limit}")


def is_finite(value: Any) -> bool:
    """Return whether the value is a finite number; None, text and NaN are not."""
    try:
        return not isinstance(value, str | bytes) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def skipped_update(metrics: Mapping[str, Any]) -> str:
    """Return why the trainer did not apply an update, or that of a mini-batch; empty if it did.

    verl skips an update whose gradients are not finite, and only prints that. The norm in its metrics is the
    mean over the mini-batches.
    """
    norms = {name: value for name, value in metrics.items() if name.endswith("/grad_norm")}
    lost = [f"{name} is {value}" for name, value in norms.items() if not is_finite(value)]
    return ", ".join(lost)


class GroupVerdict(NamedTuple):
    """The decision not to train a group."""

    why: str
    again: bool
    """Generate its responses again."""


class BadData:
    """The flaws that a run has met, and the prompts that it has quarantined."""

    def __init__(
        self, policies: Mapping[str, str], attempts: int, say: Callable[[str], None] = lambda line: None
    ) -> None:
        """`policies`: by kind; `attempts`: how often to generate for a prompt. `say` gets a line for
        the user for each of the first ten flaws of a kind, each tenth of the first hundred, and so on.
        """
        self.counts: Counter[str] = Counter()
        """Groups by kind; a group with several flaws counts once for each kind."""
        self.writers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Counts by kind for each of the last KEPT_WRITERS writers, where the writer is known."""
        self.quarantined: dict[str, tuple[str, str]] = {}
        """Uid and reason, by prompt."""
        self._policies, self._attempts, self._say = policies, attempts, say
        self._failures: Counter[str] = Counter()
        self._groups = self._dropped = 0

    def judge(self, uid: str, prompt: str, flaws: Sequence[Flaw]) -> GroupVerdict | None:
        """Decide about a finished group; returns None if it is trained. `prompt`: identifies the
        prompt.

        Raises BadDataError if a kind ends the run, or if more than half of all groups were dropped.
        """
        worst = self._count(uid, flaws)
        if worst is None:
            self._groups += 1
            self._failures.pop(prompt, None)
            return None
        self._failures[prompt] += 1
        again = worst.kind not in HOPELESS and self._failures[prompt] < self._attempts
        if not again:
            del self._failures[prompt]
            self.quarantined[prompt] = uid, str(worst)
            self._drop(str(worst))
        return GroupVerdict(str(worst), again)

    def refuse(self, prompt: str) -> GroupVerdict | None:
        """Return a verdict if the prompt is quarantined, not to be generated, or None. Raises as `judge`."""
        found = self.quarantined.get(prompt)
        if found is None:
            return None
        why = f"quarantined since group {found[0]}: {found[1]}"
        self._drop(why)
        return GroupVerdict(why, False)

    def metrics(self) -> dict[str, float]:
        """Return the groups so far by kind, and the number of quarantined prompts."""
        return {
            **{f"bad_data/{kind}": float(self.counts[kind]) for kind in KINDS},
            "bad_data/quarantined": float(len(self.quarantined)),
        }

    def summary(self) -> dict[str, Any]:
        """Return the part of `summary.json`: flaws by kind and writer, the first quarantined prompts."""
        shown = list(self.quarantined.values())[:SHOWN]
        return {
            "groups": {kind: self.counts[kind] for kind in KINDS if self.counts[kind]},
            "writers": {writer: dict(counts) for writer, counts in self.writers.items()},
            "prompts_quarantined": len(self.quarantined),
            "quarantined": [{"uid": uid, "why": why} for uid, why in shown],
        }

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {
            "counts": dict(self.counts),
            "quarantined": {prompt: list(found) for prompt, found in self.quarantined.items()},
            "failures": dict(self._failures),
            "groups": self._groups,
            "dropped": self._dropped,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of an earlier process."""
        self.counts, self._failures = Counter(state["counts"]), Counter(state["failures"])
        self.quarantined = {
            prompt: (str(uid), str(why)) for prompt, (uid, why) in state["quarantined"].items()
        }
        self._groups, self._dropped = int(state["groups"]), int(state["dropped"])

    def _count(self, uid: str, flaws: Sequence[Flaw]) -> Flaw | None:
        """Count the flaws; return the one that drops the group, or None. Raises BadDataError to end it."""
        first = {flaw.kind: flaw for flaw in reversed(flaws)}
        for kind, flaw in first.items():
            self.counts[kind] += 1
            if flaw.writer:
                self.writers[flaw.writer][kind] += 1
                if len(self.writers) > KEPT_WRITERS:
                    del self.writers[next(iter(self.writers))]
            if self._policies[kind] == "fail":
                raise BadDataError(
                    f"group {uid} is bad: {flaw}; set {_knob(kind)}=drop to continue without such groups"
                )
            if is_round(self.counts[kind]):
                groups = f"{self.counts[kind]} group{'s' if self.counts[kind] > 1 else ''} so far"
                self._say(
                    f"bad data, {self._policies[kind]} as {_knob(kind)} says, {groups}: group {uid}: {flaw}"
                )
        return next((flaw for kind, flaw in first.items() if self._policies[kind] == "drop"), None)

    def _drop(self, why: str) -> None:
        self._groups += 1
        self._dropped += 1
        if self._dropped >= MANY_DROPPED and self._dropped > self._groups / 2:
            raise BadDataError(
                f"{self._dropped} of {self._groups} groups could not be used; the last, because {why}"
            )


def is_round(count: int) -> bool:
    """Return whether a count has one digit that is not 0: 1 to 9, 10, 20, ..., 100, 200, ..."""
    return not str(count)[1:].strip("0")


def _knob(kind: str) -> str:
    return "reward.failure" if kind == NO_SCORE else f"faults.bad_data.{kind}"
