# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline episodes RUN`: print the episodes of a trained step, those with the lowest reward first, or
write a page of them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from ...console import echo
from ...core.groups.items import episode_of
from ...observe.run_directory.agent_output import KeptOutput
from ..report.episode_page import episode_page
from ..report.figures.episodes import (
    EpisodeRecord,
    EpisodesRead,
    TextPart,
    by_episode,
    lowest_rewards,
    read_episodes,
)

READ, WROTE = ">", "<"
"""Marks of lines."""
OTHER_OUTPUTS = 10
"""How many files of episodes that the step has not trained are named, the newest ones."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline episodes`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, such as outputs/smoke/latest")
    parser.add_argument("--step", type=int, metavar="S", help="a trained step (default: the last one)")
    parser.add_argument(
        "--worst", type=int, metavar="N", help="show only the N episodes with the lowest reward"
    )
    parser.add_argument(
        "--html",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help="write a page that shows them by prompt instead (default: episodes.html in the run directory)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the episodes, or write their page. Raises RunFilesError if there is no ledger or no such step."""
    found = read_episodes(args.run, args.step)
    if args.html is None:
        for line in in_words(found, args.worst):
            echo(line)
        return 0

    path = args.run / "episodes.html" if args.html == Path() else args.html
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(episode_page(args.run, found, args.worst), encoding="utf-8")
    echo(f"wrote {path}")
    return 0


def in_words(found: EpisodesRead, worst: int | None) -> Iterator[str]:
    """Yield lines of text: a summary of the step, then its episodes."""
    episodes = by_episode(found.episodes)
    # The score belongs to the last conversation.
    last = [conversations[-1] for conversations in episodes]
    rewards = [one.reward for one in last if one.reward is not None]
    mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
    counts = ", ".join(f"{count} {end}" for end, count in sorted(Counter(one.end for one in last).items()))
    several = f" in {len(found.episodes)} conversations" if len(found.episodes) > len(last) else ""
    yield f"step {found.step}: {len(last)} episodes{several}{mean}; ends: {counts}"
    if found.without_text:
        yield found.without_text
    if any(one.parts for one in found.episodes):
        yield f"{READ} what the policy read, {WROTE} what it wrote"
    outputs: dict[str, list[KeptOutput]] = {}
    for output in found.outputs:
        outputs.setdefault(output.episode, []).append(output)
    for conversations in lowest_rewards(episodes, worst):
        for number, one in enumerate(conversations, start=1):
            yield from _conversation(one, number, len(conversations))
        yield from _outputs(outputs.get(episode_of(conversations[-1].key), ()))

    shown = {episode_of(one.key) for one in last}
    others = [output for output in found.outputs if output.episode not in shown]
    if others:
        yield ""
        yield f"{len(others)} failed attempts at episodes that this step has not trained:"
        yield from _outputs(others[-OTHER_OUTPUTS:])


def _outputs(outputs: Sequence[KeptOutput]) -> Iterator[str]:
    """Yield failed attempts, each with its file."""
    for one in outputs:
        yield f"  attempt {one.attempt} at {one.episode}: {one.end}: {one.why}"
        yield f"    {one.path}"


def _conversation(one: EpisodeRecord, number: int, count: int) -> Iterator[str]:
    """Yield a conversation, the `number`th of the `count` of its episode."""
    first, last = one.versions
    about = [one.key]
    if count > 1:
        about.append(f"conversation {number} of {count}")
    about += [f"{'prompt' if name == 'index' else name} {value}" for name, value in one.place.items()]
    if one.is_last:
        repeated = f", attempt {one.attempts}" if one.attempts > 1 else ""
        about += [f"reward {one.reward}", f"end {one.end}{repeated}"]
    about += [
        f"{one.turns} turn{'s' if one.turns > 1 else ''}",
        f"{one.tokens} tokens",
        f"version {first}" if first == last else f"versions {first} to {last}",
    ]
    yield ""
    yield "  ".join(about)
    for picture in one.pictures:
        yield f"  {READ} picture {picture}"
    parts = [TextPart(False, one.prompt or ""), *one.parts]
    for own, turn in groupby(parts, key=lambda part: part.own):
        text = "".join(part.text for part in turn)
        # The chat template's line breaks between two turns belong to none; an empty answer is one too.
        for line in text.strip("\n").splitlines() or ([""] if own else []):
            yield f"  {WROTE if own else READ} {line}".rstrip()
