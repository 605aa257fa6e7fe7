# SPDX-License-Identifier: Apache-2.0
"""The trained episodes of a run: how each ended, from the ledger, and its text, if verl has written it.

verl writes the text of each step's responses into `trainer.rollout_data_dir`, one file per step, with their
keys, which the ledger has too. Rows with which verl pads a batch are in the file only. This package adds who
wrote which part of a response (`verl_bridge.trainer.reporting.episode_texts`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ....core.groups.items import last_keys
from ....errors import RunFilesError
from ....observe.run_directory.agent_output import KeptOutput, read_outputs
from ...ledger.audit import valid
from ...ledger.file import NAME


class TextPart(NamedTuple):
    """A part of a response that one version of the policy wrote, or that the policy read."""

    own: bool
    """Whether the policy wrote it."""
    text: str
    version: int | None = None
    """None if the policy read it, or if the version is unknown."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """One trained episode, or one of its conversations if an agent has led several."""

    key: str
    step: int
    reward: float | None
    end: str
    attempts: int
    tokens: int
    versions: tuple[int, int]
    """The versions that wrote its first and last tokens."""
    is_last: bool = True
    """False: another conversation of the same episode follows."""
    prompt: str | None = None
    """None: its text is not known."""
    response: str | None = None
    parts: tuple[TextPart, ...] = ()
    """The parts of the response in order; empty without a text. Adjacent ones of the policy are one turn."""
    turns: int = 1
    """Answers of the policy."""
    turn_rewards: tuple[float, ...] = ()
    """Of each turn; empty if only the response as a whole has a reward."""
    pictures: tuple[str, ...] = ()
    """Files of the pictures of the prompt, or the names that the data has for them."""
    place: Mapping[str, Any] = field(default_factory=dict)
    """`index` and `seed` of its prompt, as far as they are known."""


@dataclass(frozen=True, kw_only=True)
class EpisodesRead:
    """The episodes of one step."""

    step: int
    episodes: tuple[EpisodeRecord, ...]
    without_text: str = ""
    """Why the text is not known; empty if it is."""
    outputs: tuple[KeptOutput, ...] = ()
    """The failed attempts that are kept, of all steps, the newest last."""


def read_episodes(run: Path, step: int | None = None) -> EpisodesRead:
    """Return the episodes of a step, the last one by default.

    Raises RunFilesError if there is no ledger, or if it has no such step.
    """
    trained = _trained(run / NAME)
    outputs = tuple(read_outputs(run))
    if not trained:
        written = f"; {outputs[-1].path.parent} has the failed attempts" if outputs else ""
        raise RunFilesError(
            f"{run / NAME} has no trained step; wait for one, or give another run directory{written}"
        )
    chosen = max(trained) if step is None else step
    if chosen not in trained:
        raise RunFilesError(f"step {step} is not in {run / NAME}; its steps are 1 to {max(trained)}")
    last = last_keys(str(one["key"]) for one in trained[chosen])
    found = sorted((_record(one, chosen, last) for one in trained[chosen]), key=lambda one: _order(one.key))

    texts, why = _texts(run, chosen)
    known = [_with_text(one, texts[one.key]) if one.key in texts else one for one in found]
    if texts and (without := sum(one.response is None for one in known)):
        why = f"the text of {without} of {len(known)} responses is not in the file of step {chosen}"
    return EpisodesRead(step=chosen, episodes=tuple(known), without_text=why, outputs=outputs)


def by_episode(records: Iterable[EpisodeRecord]) -> list[list[EpisodeRecord]]:
    """Return the conversations of each episode. `records`: in the order of their keys."""
    episodes: list[list[EpisodeRecord]] = [[]]
    for one in records:
        episodes[-1].append(one)
        if one.is_last:
            episodes.append([])
    return [one for one in episodes if one]


def lowest_rewards(episodes: Sequence[list[EpisodeRecord]], count: int | None) -> list[list[EpisodeRecord]]:
    """Return at most `count` episodes, the lowest reward first; the last conversation has the reward."""

    def rank(episode: list[EpisodeRecord]) -> float:
        reward = episode[-1].reward
        return -math.inf if reward is None else reward

    return sorted(episodes, key=rank)[:count]


def _trained(ledger: Path) -> dict[int, list[Mapping[str, Any]]]:
    """Return the trajectories of each step. Raises RunFilesError if there is no ledger."""
    if not ledger.is_file():
        raise RunFilesError(f"{ledger} does not exist; give a run directory")
    finished: dict[str, list[Mapping[str, Any]]] = {}
    steps: dict[int, list[Mapping[str, Any]]] = {}
    for record in valid(list(_records(ledger))):
        if record["kind"] == "finished":
            finished[str(record["uid"])] = record["trajectories"]
        elif record["kind"] == "trained":
            uids = [str(uid) for uid in record["uids"]]
            steps[int(record["step"])] = [one for uid in uids for one in finished.pop(uid, ())]
    return steps


def _records(ledger: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete records; `async-pipeline ledger` reports the others."""
    with ledger.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("n"), int) and "kind" in record:
                yield record


def _record(one: Mapping[str, Any], step: int, last: Collection[str]) -> EpisodeRecord:
    return EpisodeRecord(
        key=str(one["key"]),
        step=step,
        reward=one.get("reward"),
        end=str(one.get("end", "done")),
        attempts=int(one.get("attempts", 1)),
        tokens=int(one["tokens"]),
        versions=(int(one["first"]), int(one["last"])),
        is_last=str(one["key"]) in last,
        turns=int(one.get("turns", 1)),
    )


def _with_text(one: EpisodeRecord, text: Mapping[str, Any]) -> EpisodeRecord:
    response = str(text.get("output"))
    first, last = one.versions
    known = first if first == last else None
    parts = text.get("turns") or [[True, response]]
    return replace(
        one,
        prompt=str(text.get("input")),
        response=response,
        parts=tuple(
            TextPart(bool(own), str(part), version[0] if version and version[0] is not None else known)
            if own
            else TextPart(False, str(part))
            for own, part, *version in parts
        ),
        turn_rewards=tuple(text.get("turn_rewards") or ()),
        pictures=tuple(text.get("pictures") or ()),
        place=text.get("place") or {},
    )


def _order(key: str) -> tuple[Any, ...]:
    """Return what verl sorts the responses of a step by."""
    parts = key.rsplit("_", 2)
    numbered = len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal()
    return (parts[0], int(parts[1]), int(parts[2])) if numbered else (key, 0, 0)


def _texts(run: Path, step: int) -> tuple[Mapping[str, Mapping[str, Any]], str]:
    """Return verl's rows of a step by key, and why there are none."""
    key = "trainer.rollout_data_dir"
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        folder = config.get("trainer", {}).get("rollout_data_dir") or config.get(key)
    except (OSError, ValueError, AttributeError):
        folder = None
    if not folder:
        return {}, f"the run wrote no text; set {key} to have it"
    file = Path(folder) / f"{step}.jsonl"
    # The path is relative to the folder in which the run was started.
    if not file.is_file() and (inside := run / file.parent.name / file.name).is_file():
        file = inside
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for row in rows:
            row["pictures"] = [_picture(file.parent, str(name)) for name in row.get("pictures") or ()]
        return {str(row["uid"]): row for row in rows}, ""
    except (OSError, ValueError, KeyError, TypeError):
        return {}, f"{file} cannot be read"


def _picture(folder: Path, name: str) -> str:
    """Return the path of a picture that the run has written, and the name of another as it is."""
    return str(folder / name) if (folder / name).is_file() else name
