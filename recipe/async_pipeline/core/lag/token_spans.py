# SPDX-License-Identifier: Apache-2.0
"""Which policy version wrote which tokens of a response.

A response is a sequence of spans. Files, the ledger and verl's fields have them as pairs of numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class TokenSpan(NamedTuple):
    """Tokens of a response that `version` wrote: from `start` until the next span."""

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
