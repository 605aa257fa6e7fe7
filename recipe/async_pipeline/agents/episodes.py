# SPDX-License-Identifier: Apache-2.0
"""The ends of an episode, what is to blame for each, and what happens then.

    attempt ──► end ──► train   trained with the reward that it got
       ▲                score   trained with `failure_reward` instead
       │                again ──┬──► while attempts are left; its seed and its siblings stay
       └────────────────────────┘
                        drop    the last attempt has failed: its group is bad data (`core.groups.bad_data`)

An episode is one response of a group: all requests, tool calls and steps of an environment from its prompt to
its reward. What the policy is to blame for is trained; what the policy is not to blame for must neither be
trained as if it were nor cost the other episodes of the group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Literal, NamedTuple, get_args, get_type_hints

from ..core.groups.items import Group, Trajectory, episode_of, last_keys

Action = Literal["train", "score", "again", "drop"]
Blame = Literal["policy", "environment", "agent", "unknown", "none"]
DONE = "done"
"""The end of an episode that reached its own end."""
REDUNDANT = "redundant"
"""The end of an episode that its group did not need: enough others had finished."""
RECALLED = "recalled"
"""The end of an episode that was given up with its whole group, because that held up a step. The ledger has
the record of the group: `again` with the reason `stale`, or the fate `expired`.
"""
FAILED_EPISODE = "failed_episode"
"""The kind of bad data that a dropped episode is."""


@dataclass(frozen=True, kw_only=True)
class EndPolicies:
    """What happens to an episode that did not reach its own end: train (it is trained with the reward that it
    got), score (it is trained with `failure_reward`), again (this episode is repeated, up to `attempts` in
    all, while the other episodes of its group are kept; then as drop), or drop (its group is not trained, as
    faults.bad_data.failed_episode says). The agent loop `environment` knows all ends; `agent_session` all but
    `invalid`, and env_failed only of `verify`; `chains` is an end of agents only; others know the last two.
    """

    turns: Literal["train", "score"] = "train"
    """`max_turns` was reached before the environment ended the episode."""
    chains: Literal["train", "score"] = "train"
    """The agent was refused another conversation (gateway.max_chains)."""
    tokens: Literal["train", "score"] = "train"
    """The response had no room for another observation and turn (data.max_response_length), or the engine for
    its pictures (rollout.limit_images)."""
    cut_off: Literal["train", "score"] = "train"
    """A turn was cut off before its end token. The environment does not get it. An agent does: there, only a
    last turn that the limits of the run cut off is this end."""
    invalid: Literal["train", "score"] = "train"
    """The environment ended the episode because a turn was no action."""
    env_failed: Literal["again", "score", "drop"] = "again"
    """The environment raised, exceeded `env_timeout_s`, died, or returned no step. score: as again, if the
    policy has written nothing yet."""
    agent_failed: Literal["again", "drop"] = "again"
    """The agent loop raised an exception, or a tool called exit()."""
    deadline: Literal["again", "drop"] = "again"
    """The episode took longer than `episode_timeout_s`, or a tool call than `tool_timeout_s`."""


POLICIES: Mapping[str, tuple[str, ...]] = {
    name: get_args(hint) for name, hint in get_type_hints(EndPolicies).items()
}
"""The policies of each end that has a choice, the default first."""
BLAME: Mapping[str, Blame] = {
    DONE: "policy",
    "turns": "policy",
    "chains": "none",
    "tokens": "policy",
    "cut_off": "policy",
    "invalid": "policy",
    "env_failed": "environment",
    "agent_failed": "agent",
    "deadline": "unknown",
    REDUNDANT: "none",
    RECALLED: "none",
}
"""All ends, and what is to blame for each."""
ENDS = tuple(BLAME)
FAILURES = tuple(end for end, policies in POLICIES.items() if "again" in policies)
"""The ends of attempts that are repeated by default."""
COUNTS: Mapping[str, str] = {
    "retries_coalesced": "requests that a client sent again, and that cost no second generation",
    "constrained": "requests whose answer had to have a form, as response_format and tool_choice ask for",
    "params_overridden": "requests with parameters that have no effect, as the ones of sampling, the run's",
    "retokenized": "requests whose history had to be encoded again, because its template cannot be continued",
    "replayed_requests": "requests that were answered with what an earlier process had generated",
    "undelivered": "answers that no client of the agent has received, which are neither trained nor scored",
    "auxiliary": "conversations besides the main one",
    "rows_of_system_prompt": "rows beyond the first of an episode, because a system prompt changed",
    "rows_of_tools": "further rows, because the tools of a conversation changed",
    "rows_of_reminder": "further rows, because a message of the user or a tool changed once it was answered",
    "rows_of_history": "further rows, because other parts of a history were edited, summarised or forgotten",
    "rows_of_branch": "further rows, because a history was continued twice",
    "rows_of_template": "further rows, because the chat template cannot be continued",
    "rows_of_others": "further rows, because a conversation has nothing in common with earlier ones",
    "closed_late": "agents that were still running some seconds after the end of their session",
    "left_behind": "what could not be ended: threads of environments, processes that left their group",
}
"""What is counted in episodes besides their ends; metrics of a step, `agentic/*`."""
PEAKS: Mapping[str, str] = {"open_sessions": "sessions that were open at once in one agent loop worker"}
"""As `COUNTS`, but of several episodes the largest counts."""


class EpisodeRules(NamedTuple):
    """The rules of a run for the episodes that did not reach their own end."""

    attempts: int
    """How often an episode is played, at most."""
    policies: Mapping[str, str]
    """By end; see `POLICIES`."""

    @classmethod
    def of(cls, attempts: int, policies: EndPolicies) -> EpisodeRules:
        """Return the rules that a config states."""
        return cls(attempts, asdict(policies))

    def judge(self, end: str, attempt: int, *, written: bool) -> Action:
        """Decide about attempt number `attempt`, from 1, which ended this way.

        `written`: it left a response that can be trained. Raises KeyError for an unknown end.
        """
        policy = "train" if end == DONE else self.policies[end]
        if written and policy == "train":
            return "train"
        if written and policy == "score":
            return "score"
        return "again" if policy != "drop" and attempt < self.attempts else "drop"


ROW_REASONS: Mapping[str, str] = {
    "rows_of_system_prompt": "a system prompt that changes",
    "rows_of_tools": "tools that change",
    "rows_of_reminder": "a reminder that is only in the newest message",
}
"""What begins a row with each turn without a need, in words."""
MANY_ROWS = 2.0
"""Rows of an episode on average from which on the output explains them."""


def explain_rows(metrics: Mapping[str, float]) -> str | None:
    """Return why the episodes of a step have many rows, or None if they have few. `metrics`: `metrics_of`."""
    rows, episodes = metrics.get("agentic/conversations", 0.0), metrics.get("agentic/episodes", 0.0)
    if not episodes or rows < MANY_ROWS * episodes:
        return None
    counts = {words: int(metrics.get(f"agentic/{name}", 0)) for name, words in ROW_REASONS.items()}
    reasons = [f"{words} ({count})" for words, count in counts.items() if count]
    others = int(rows - episodes) - sum(counts.values())
    if others > 0:
        reasons.append(f"other changes of the history ({others})")
    return (
        f"the agent has {rows / episodes:.1f} rows of training an episode, because a request that does not "
        f"append to a history begins another one: {', '.join(reasons)}; see docs/agents.md, Histories that "
        "change"
    )


MAX_SOURCES = 16
"""Data sources that have metrics, the first ones by name."""


def counted_together(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return what happened in several episodes: sums, and the largest of `PEAKS`."""
    found: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            before = found.get(name, 0)
            found[name] = max(before, count) if name in PEAKS else before + count
    return found


def last_responses(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Return the last response of each episode: an agent that changes its history leaves several."""
    found = list(trajectories)
    last = last_keys(one.key for one in found)
    return [one for one in found if one.key in last]


def metrics_of(groups: Iterable[Group]) -> dict[str, float]:
    """Return the metrics of the episodes of a step; empty if all are single responses without incident."""
    step = list(groups)
    rows = [one for group in step for one in group.trajectories]
    found = [one for group in step for one in last_responses(group.trajectories)]
    redundant = sum(group.redundant for group in step)
    turns = _turns_of_episodes(rows)
    repeated = sum(one.attempts - 1 for one in found)
    noted = counted_together(group.counts for group in step)
    incidents = repeated or redundant or any(noted.values()) or any(one.end != DONE for one in found)
    if not incidents and max(turns, default=0) <= 1:
        return {}

    counts = {f"agentic/end/{end}": float(sum(one.end == end for one in found)) for end in ENDS}
    counts[f"agentic/end/{REDUNDANT}"] = float(redundant)
    counts[f"agentic/end/{RECALLED}"] = float(sum(map(_recalled, step)))
    metrics = {"agentic/episodes": float(len(found)), "agentic/again": float(repeated), **counts}
    metrics |= {f"agentic/{name}": float(count) for name, count in noted.items()}
    if len(rows) > len(found):
        metrics["agentic/conversations"] = float(len(rows))
    if found:
        succeeded = sum(one.end == DONE and (one.reward or 0.0) > 0 for one in found)
        metrics["agentic/success"] = succeeded / len(found)
    if turns:
        metrics |= {"agentic/turns/mean": fmean(turns), "agentic/turns/max": float(max(turns))}
    versions = _versions_of_episodes(rows)
    if versions:
        most, mean = "agentic/versions_per_episode/max", "agentic/versions_per_episode/mean"
        metrics |= {mean: fmean(versions), most: float(max(versions))}
    for name in ("model_s", "env_s"):
        waits = [wait for one in found if (wait := getattr(one, name)) is not None]
        if waits:
            metrics |= {f"agentic/{name}/mean": fmean(waits), f"agentic/{name}/p95": _p95(waits)}
    took_ms = [took for group in step for took in group.took_ms]
    if took_ms:
        metrics["agentic/gateway_ms_p95"] = _p95(took_ms)
    return metrics


def metrics_by_source(groups: Iterable[Group]) -> dict[str, float]:
    """Return the metrics of a step's episodes by data source; empty if all prompts have the same one."""
    sources: dict[str, list[Trajectory]] = {}
    for group in groups:
        sources.setdefault(group.source, []).extend(group.trajectories)
    metrics = {}
    for source, rows in sorted(sources.items())[:MAX_SOURCES] if len(sources) > 1 else ():
        found = last_responses(rows)
        metrics[f"source/{source}/episodes"] = float(len(found))
        if rewards := [one.reward for one in found if one.reward is not None]:
            metrics[f"source/{source}/reward/mean"] = fmean(rewards)
        if turns := _turns_of_episodes(rows):
            metrics[f"source/{source}/turns/mean"] = fmean(turns)
    return metrics


def _recalled(group: Group) -> int:
    """Return how many episodes of a group were recalled: each time all that had been begun."""
    return group.recalls * (len(last_responses(group.trajectories)) + group.redundant)


def _p95(values: Iterable[float]) -> float:
    """Return the smallest value that 95 % do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(0.95 * len(ordered)) - 1]


def _turns_of_episodes(rows: Iterable[Trajectory]) -> list[int]:
    """Return the turns of each episode whose turns are known. Each answer is in one of its conversations."""
    turns: dict[str, int] = {}
    for one in rows:
        if one.turns is not None:
            episode = episode_of(one.key)
            turns[episode] = turns.get(episode, 0) + one.turns
    return [*turns.values()]


def _versions_of_episodes(rows: Iterable[Trajectory]) -> list[int]:
    """Return how many versions have written each episode whose tokens' versions are known."""
    versions: dict[str, set[int]] = {}
    for one in rows:
        if one.spans is not None:
            versions.setdefault(episode_of(one.key), set()).update(version for version, _ in one.spans)
    return [len(found) for found in versions.values()]
