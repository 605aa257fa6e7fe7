# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline episodes RUN`: print the episodes of a trained step, those with the lowest reward first."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ..console import echo
from ..observe.episodes import EpisodeRecord, EpisodesRead, read_episodes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline episodes`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, such as outputs/smoke/latest")
    parser.add_argument("--step", type=int, metavar="S", help="a trained step (default: the last one)")
    parser.add_argument(
        "--worst", type=int, metavar="N", help="print only the N episodes with the lowest reward"
    )


def run(args: argparse.Namespace) -> int:
    """Print the episodes. Raises RunFilesError if there is no ledger or no such step."""
    for line in in_words(read_episodes(args.run, args.step), args.worst):
        echo(line)
    return 0


def in_words(found: EpisodesRead, worst: int | None) -> Iterator[str]:
    """Yield lines of text: a summary of the step, then its episodes."""
    ranked = sorted(found.episodes, key=lambda one: -math.inf if one.reward is None else one.reward)
    rewards = [one.reward for one in ranked if one.reward is not None]
    mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
    ends = Counter(one.end for one in ranked)
    counts = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    yield f"step {found.step}: {len(ranked)} episodes{mean}; ends: {counts}"
    if found.without_text:
        yield found.without_text
    for one in ranked[:worst]:
        yield from _episode(one)


def _episode(one: EpisodeRecord) -> Iterator[str]:
    first, last = one.versions
    versions = f"version {first}" if first == last else f"versions {first} to {last}"
    repeated = f", attempt {one.attempts}" if one.attempts > 1 else ""
    yield ""
    yield f"{one.key}  reward {one.reward}  {one.end}{repeated}  {one.tokens} tokens  {versions}"
    for mark, text in ((">", one.prompt), ("<", one.response)):
        for line in (text or "").splitlines():
            yield f"  {mark} {line}"
