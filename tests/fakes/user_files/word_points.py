# SPDX-License-Identifier: Apache-2.0
"""A reward function as users write them: with models, neighbours, decorators and processes."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from points_table import POINTS  # type: ignore[import-not-found]
from pydantic import BaseModel


@dataclass
class Rubric:
    """Its annotations are texts, which dataclasses look up in the module that has the class."""

    words: dict[str, float] = field(default_factory=dict)


class Verdict(BaseModel):
    """Its annotations are texts, which pydantic looks up in the module that has the class."""

    word: str
    points: float | None = None


def doubled(function: Callable[..., float]) -> Callable[..., float]:
    """Double the points of a function."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> float:
        return 2 * function(*args, **kwargs)

    return call


@doubled
def half(word: str) -> float:
    """Return half of the length of a word."""
    return len(word) / 2


def length(word: str) -> float:
    """Return the length of a word."""
    return float(len(word))


def send_length(sender: Any, word: str) -> None:
    """Send the length of a word to another process."""
    sender.send(length(word))


def _by_process(word: str, method: str) -> float:
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_length, args=(sender, word))
    process.start()
    sender.close()
    try:
        return float(receiver.recv())
    finally:
        process.join()


def _by_pool(word: str, method: str) -> float:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        return pool.submit(length, word).result()


KINDS: dict[str, Callable[[str], float]] = {
    "dataclass": lambda word: pickle.loads(pickle.dumps(Rubric({word: 9.0}))).words[word],
    "pydantic": lambda word: Verdict(word=word, points=8.0).points or 0.0,
    "neighbour": POINTS.__getitem__,
    "decorator": half,
    "process": lambda word: _by_process(word, "fork"),
    "spawned": lambda word: _by_process(word, "spawn"),
    "executor": lambda word: _by_pool(word, "fork"),
    "spawning executor": lambda word: _by_pool(word, "spawn"),
}


def points(solution_str: str, **_: Any) -> float:
    """Return the points of a kind, computed as the kind says."""
    return KINDS[solution_str](solution_str)


async def points_later(solution_str: str, **_: Any) -> float:
    """Return the points of a kind, as an async function."""
    return points(solution_str)
