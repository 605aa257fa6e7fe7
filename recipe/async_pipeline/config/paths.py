# SPDX-License-Identifier: Apache-2.0
"""Dotted paths in a config: look one up, walk all of them, suggest the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

OWN = "trainer.v1.async_pipeline"
"""Section of the user's knobs."""
RUNTIME = "trainer.v1.async_pipeline_runtime"
"""Section of the run's state, written when the run is launched."""
MODE = "trainer.v1.trainer_mode"
"""verl's key for the name of the trainer."""
PATCH_FREE = "async_pipeline"
"""Its value that switches the pipeline on in a verl without our patches."""


def select(raw: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None."""
    node: Any = raw
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node


def walk(raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all dotted paths of a nested mapping with their values, inner nodes included."""
    for name, value in raw.items():
        path = f"{prefix}{name}"
        yield path, value
        if isinstance(value, Mapping):
            yield from walk(value, f"{path}.")


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested mapping of values that are given by dotted paths."""
    root: dict[str, Any] = {}
    for path, value in values.items():
        *parents, leaf = path.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return root


_SHORT = 4
"""Names of so few letters resemble too many others: they begin with the same letter, too."""


def nearest(name: str, known: Iterable[object], cutoff: float = 0.6) -> str | None:
    """Return the known name that a name resembles most, by at least `cutoff`, or None.

    Names that differ in upper and lower case only are equal. Names with another word are not misspelled:
    `max_obs_length` is not `max_prompt_length`. A name that has all words of just one known name but some is
    meant for it.
    """
    wanted, by_lower = str(name).lower(), {str(one).lower(): str(one) for one in known}
    words = set(wanted.split("_"))
    if words_left_out := [one for one in by_lower if len(words) > 1 and words < set(one.split("_"))]:
        return by_lower[words_left_out[0]] if len(words_left_out) == 1 else None
    close = difflib.get_close_matches(wanted, sorted(by_lower), n=3, cutoff=cutoff)
    near = (one for one in close if len(wanted) > _SHORT or one[:1] == wanted[:1])
    return next((by_lower[one] for one in near if _has_words_of(wanted, one)), None)


def _has_words_of(name: str, other: str) -> bool:
    """Return whether each word of a name may be meant for the one of another name, if they are as many."""
    words, others = name.split("_"), other.split("_")
    return len(words) != len(others) or all(
        one.startswith(two) or two.startswith(one) or difflib.get_close_matches(one, [two], cutoff=0.5)
        for one, two in zip(words, others, strict=True)
    )


def hint(name: str, known: Iterable[object], cutoff: float = 0.6) -> str:
    """Return ` (did you mean 'x'?)` for the nearest known name, or nothing if none is near."""
    near = nearest(name, known, cutoff)
    return "" if near is None else f" (did you mean {near!r}?)"
