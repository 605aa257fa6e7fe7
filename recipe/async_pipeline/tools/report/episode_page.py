# SPDX-License-Identifier: Apache-2.0
"""Render the episodes of a step as a self-contained page: the episodes of a prompt side by side, each turn
with its tool calls and the versions that wrote it.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from ...core.groups.items import episode_of
from ...observe.run_directory.agent_output import KeptOutput
from .drawing.wording import amount
from .figures.episodes import EpisodeRecord, EpisodesRead, TextPart, by_episode, lowest_rewards
from .html_page import TEMPLATES, page

MAX_EPISODES = 256
"""Episodes of a page without `--worst`, the lowest rewards first."""
MAX_PART = 20_000
"""Characters of a turn, or of what was read before it; the middle of a longer one is left out."""
MAX_PAGE = 8_000_000
"""Characters of text of a page; further episodes have none."""
MAX_OUTPUTS = 20
"""Files of failed attempts that belong to no episode of the page, the newest ones."""
COLOURS = ("c-generate", "c-train", "c-sync", "c-values", "c-logp", "c-other", "c-data", "c-reward")
"""Of versions, in their order; more versions use the colours again."""
CALLS = (
    (r"<tool_call>", r"</tool_call>"),
    (r"<function=", r"</function>"),
    (r"<(?:｜DSML｜)?invoke name=", r"</(?:｜DSML｜)?invoke>"),
    (r"<｜tool▁call▁begin｜>", r"<｜tool▁call▁end｜>"),
    (r"<\|tool_call_begin\|>", r"<\|tool_call_end\|>"),
    (r"functions\.[\w-]+:\d+\{", r"(?=functions\.[\w-]+:\d+\{)"),
    (r"(?:<\|channel\|>)?commentary to=functions\.", r"<\|call\|>"),
)
"""How the chat templates of the most frequent model families begin and end calls of tools. verl's files lack
the special tokens, so the forms of Kimi and gpt-oss are known without them too."""
CALL = re.compile("|".join(rf"{begin}.*?(?:{end}|\Z)" for begin, end in CALLS), re.DOTALL)


class TurnPart(NamedTuple):
    """Text of one version that is in a call of a tool, or outside of one."""

    text: str
    version: int | None
    is_call: bool


class ShownTurn(NamedTuple):
    """What the policy read, or wrote, in one go."""

    heading: str
    own: bool
    segments: Sequence[TurnPart]


class Conversation(NamedTuple):
    """A row of training."""

    record: EpisodeRecord
    heading: str
    turns: Sequence[ShownTurn]


class ShownEpisode(NamedTuple):
    """The conversations of an episode; the last one has its reward and its end."""

    conversations: Sequence[Conversation]
    outputs: Sequence[KeptOutput]

    @property
    def last(self) -> EpisodeRecord:
        return self.conversations[-1].record


class SeenPicture(NamedTuple):
    """A picture of a prompt."""

    name: str
    source: str
    """The picture itself as a data URI; empty if its file is not there, or the page has no room for it."""


class ShownGroup(NamedTuple):
    """The shown episodes of a prompt."""

    heading: str
    about: Sequence[str]
    pictures: Sequence[SeenPicture]
    prompt: ShownTurn | None
    """None if the prompt is unknown, or not the same for all."""
    episodes: Sequence[ShownEpisode]


def episode_page(run: Path, read: EpisodesRead, worst: int | None = None) -> str:
    """Return the page of a step, or of its `worst` episodes."""
    episodes = by_episode(read.episodes)
    shown = lowest_rewards(episodes, MAX_EPISODES if worst is None else worst)
    groups = _groups(read, shown)
    versions = _versions(group.episodes for group in groups)
    keys = {episode_of(episode[-1].key) for episode in episodes}
    others = [output for output in read.outputs if output.episode not in keys]
    return page(
        f"{TEMPLATES}/episodes.html",
        title=f"{run.resolve().name}: episodes of step {read.step}",
        run=run,
        read=read,
        facts=_facts(episodes),
        missing=_missing(read, len(episodes) - len(shown), groups),
        groups=groups,
        colours={version: COLOURS[at % len(COLOURS)] for at, version in enumerate(versions)},
        others=others[-MAX_OUTPUTS:],
        other_count=len(others),
    )


def _facts(episodes: Sequence[Sequence[EpisodeRecord]]) -> Iterator[str]:
    """Yield the main figures of the step."""
    last = [episode[-1] for episode in episodes]
    yield f"{len(last)} episodes"
    rows = sum(len(episode) for episode in episodes)
    if rows > len(last):
        yield f"{rows} conversations"
    rewards = [one.reward for one in last if one.reward is not None]
    if rewards:
        yield f"mean reward {amount(fmean(rewards))}"
    ends = sorted(Counter(one.end for one in last).items())
    yield "ends: " + ", ".join(f"{count} {end}" for end, count in ends)


def _missing(read: EpisodesRead, left_out: int, groups: Sequence[ShownGroup]) -> Iterator[str]:
    """Yield what the page lacks."""
    if read.without_text:
        yield read.without_text
    if left_out:
        yield f"{left_out} episodes with higher rewards are left out"
    records = [
        (one.record, one.turns)
        for group in groups
        for episode in group.episodes
        for one in episode.conversations
    ]
    without = sum(bool(record.parts) and not turns for record, turns in records)
    if without:
        yield f"the text of {without} conversations is left out: a page has at most {MAX_PAGE:,} characters"


def _groups(read: EpisodesRead, shown: Sequence[Sequence[EpisodeRecord]]) -> list[ShownGroup]:
    """Return the prompts of these episodes, the one with the lowest reward first."""
    outputs: dict[str, list[KeptOutput]] = {}
    for output in read.outputs:
        outputs.setdefault(output.episode, []).append(output)
    prompts: dict[str, list[Sequence[EpisodeRecord]]] = {}
    for episode in shown:
        prompts.setdefault(_prompt_of(episode[-1].key), []).append(episode)

    room = MAX_PAGE
    groups = []
    for uid, members in prompts.items():
        members.sort(key=lambda episode: _session_of(episode[-1].key))
        texts = {one.prompt for episode in members for one in episode}
        common = texts.pop() if len(texts) == 1 else None
        pictures = [
            _picture(name, room)
            for name in dict.fromkeys(name for one in members for name in one[-1].pictures)
        ]
        room -= sum(len(one.source) for one in pictures)
        made = []
        for episode in members:
            room -= sum(_size(one, with_prompt=common is None) for one in episode)
            conversations = [
                _conversation(one, at, len(episode), with_prompt=common is None, with_text=room >= 0)
                for at, one in enumerate(episode, start=1)
            ]
            made.append(ShownEpisode(conversations, outputs.get(episode_of(episode[-1].key), ())))
        prompt = _turn("prompt", [TextPart(False, common)]) if common else None
        groups.append(ShownGroup(f"Prompt {uid}", _about(made), pictures, prompt, made))
    return groups


def _picture(name: str, room: int) -> SeenPicture:
    """Return a picture of a prompt, whose source has at most about `room` characters."""
    try:
        data = b64encode(Path(name).read_bytes()).decode()
    except OSError:
        data = ""
    return SeenPicture(Path(name).name, f"data:image/png;base64,{data}" if 0 < len(data) <= room else "")


def _about(episodes: Sequence[ShownEpisode]) -> list[str]:
    place = episodes[0].last.place
    about = [f"{name} {value}" for name, value in place.items()]
    rewards = [one.last.reward for one in episodes if one.last.reward is not None]
    if rewards:
        low, high = min(rewards), max(rewards)
        about.append(f"rewards {amount(low)} to {amount(high)}" if low < high else f"reward {amount(low)}")
    return about


def _prompt_of(key: str) -> str:
    """Return the uid of the prompt of a key; a key of another form is a prompt by itself."""
    uid, _, session = episode_of(key).rpartition("_")
    return uid if session.isdecimal() else key


def _session_of(key: str) -> int:
    session = episode_of(key).rpartition("_")[2]
    return int(session) if session.isdecimal() else 0


def _size(one: EpisodeRecord, *, with_prompt: bool) -> int:
    texts = [part.text for part in one.parts] + ([one.prompt or ""] if with_prompt else [])
    return sum(min(len(text), MAX_PART) for text in texts)


def _conversation(
    one: EpisodeRecord, number: int, count: int, *, with_prompt: bool, with_text: bool
) -> Conversation:
    heading = f"conversation {number} of {count}" if count > 1 else ""
    if not with_text:
        return Conversation(one, heading, ())
    turns = [_turn("prompt", [TextPart(False, one.prompt)])] if with_prompt and one.prompt else []
    answers = 0
    for own, parts in groupby(one.parts, key=lambda part: part.own):
        answers += own
        turn = _turn(f"turn {answers}" if own else "read", [*parts])
        if own and answers <= len(one.turn_rewards):
            turn = turn._replace(heading=f"{turn.heading}, reward {amount(one.turn_rewards[answers - 1])}")
        turns.append(turn)
    return Conversation(one, heading, turns)


def _turn(name: str, parts: Sequence[TextPart]) -> ShownTurn:
    """Return adjacent parts as one turn, split where the version changes and around calls of tools."""
    own = parts[0].own
    text = "".join(part.text for part in parts)
    calls = [match.span() for match in CALL.finditer(text)] if own else []
    cuts = {0, len(text), *(edge for call in calls for edge in call)}
    versions, at = [], 0
    for part in parts:
        versions.append((at, part.version))
        at += len(part.text)
        cuts.add(at)

    edges = sorted(cuts)
    segments = []
    for start, stop in zip(edges, edges[1:], strict=False):
        version = [version for begin, version in versions if begin <= start][-1]
        is_call = any(begin <= start < end for begin, end in calls)
        segments.append(TurnPart(text[start:stop], version, is_call))
    return ShownTurn(_heading(name, parts, len(calls)), own, _shortened(segments))


def _heading(name: str, parts: Sequence[TextPart], calls: int) -> str:
    versions = [*dict.fromkeys(str(part.version) for part in parts if part.version is not None)]
    heading = [name]
    if versions:
        heading.append(f"version{'s' if len(versions) > 1 else ''} {', '.join(versions)}")
    if calls:
        heading.append(f"{calls} tool call{'s' if calls > 1 else ''}")
    return ", ".join(heading)


def _shortened(segments: Sequence[TurnPart]) -> list[TurnPart]:
    """Return segments of at most `MAX_PART` characters; what is left out in the middle is counted."""
    size = sum(len(one.text) for one in segments)
    if size <= MAX_PART:
        return [*segments]
    head, tail = MAX_PART // 2, size - MAX_PART // 2
    kept: list[TurnPart] = []
    at = 0
    for one in segments:
        first, last = one.text[: max(0, head - at)], one.text[max(0, tail - at) :]
        if first:
            kept.append(one._replace(text=first))
        if at <= head < at + len(one.text):
            kept.append(TurnPart(f"\n… {size - MAX_PART:,} characters are left out …\n", None, False))
        if last:
            kept.append(one._replace(text=last))
        at += len(one.text)
    return kept


def _versions(episodes: Iterator[Sequence[ShownEpisode]]) -> list[int]:
    """Return the versions of all shown segments, the oldest first."""
    return sorted(
        {
            segment.version
            for group in episodes
            for episode in group
            for conversation in episode.conversations
            for turn in conversation.turns
            for segment in turn.segments
            if segment.version is not None
        }
    )
