# SPDX-License-Identifier: Apache-2.0
"""Find which version wrote each token of some trajectories, for all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...core.groups.items import Trajectory

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class TokenVersions(NamedTuple):
    """Which versions wrote the generated tokens of some trajectories, in spans of one version.

    The spans are in the order of the tokens, and together they hold every generated token.
    """

    versions: Ints
    """Of each span."""
    tokens: Ints
    """Number of generated tokens of each span; may be 0."""
    owners: Ints
    """The trajectory of each span, as an index."""
    row_tokens: Ints
    """Number of generated tokens of each trajectory."""
    known: Bools
    """Per trajectory: whether its spans are complete."""

    def changes(self) -> Ints:
        """Return per trajectory how often the version changes from one generated token to the next."""
        nonempty = self.tokens > 0
        versions, owners = self.versions[nonempty], self.owners[nonempty]
        changed = owners[1:][(np.diff(versions) != 0) & (np.diff(owners) == 0)]
        return np.bincount(changed, minlength=self.known.size)


def versions_written(trajectories: Sequence[Trajectory], lengths: Ints, generated: Bools) -> TokenVersions:
    """Return the version of each generated token; `generated` has all tokens, `lengths` of them each.

    The spans of a trajectory are complete if one begins with each turn: an agent loop of several calls may
    keep the spans of one call only. If they are not, every token counts as written by the oldest version.
    """
    first = np.cumsum(lengths) - lengths
    before = np.zeros(generated.size + 1, np.int64)
    np.cumsum(generated, out=before[1:])
    """Number of generated tokens before each position."""

    flat = [(i, *span) for i, one in enumerate(trajectories) for span in one.spans or ()]
    rows, versions, starts = np.asarray(flat, dtype=np.int64).reshape(-1, 3).T
    known = np.bincount(rows, minlength=len(trajectories)) > 0
    known[rows[1:][(np.diff(rows) == 0) & (np.diff(starts) <= 0)]] = False

    # A span behind the end of a truncated response has no tokens.
    inside = known[rows] & (starts >= 0) & (starts < lengths[rows])
    rows, versions, starts = rows[inside], versions[inside], (first[rows] + starts)[inside]
    turns = np.flatnonzero(turn_starts(generated, lengths))
    strange = turns[~np.isin(turns, starts)]
    known[np.searchsorted(first, strange, side="right") - 1] = False

    # One span from the first token on replaces the spans that are not complete.
    kept, unknown = known[rows], np.flatnonzero(~known)
    oldest = np.array([trajectories[i].first_version for i in unknown], dtype=np.int64)
    rows, versions, starts = (
        np.concatenate(pair)
        for pair in ((rows[kept], unknown), (versions[kept], oldest), (starts[kept], first[unknown]))
    )
    order = np.lexsort((starts, rows))
    rows, versions, starts = rows[order], versions[order], starts[order]
    return TokenVersions(
        versions=versions,
        tokens=np.diff(before[starts], append=before[-1]),
        owners=rows,
        row_tokens=before[first + lengths] - before[first],
        known=known,
    )


def turn_starts(generated: Bools, lengths: Ints) -> Bools:
    """Return for each token whether a turn begins: it is generated, after another token or in a new row."""
    first = (np.cumsum(lengths) - lengths)[lengths > 0]
    begins: Bools = generated.copy()
    begins[1:] &= ~generated[:-1]
    begins[first] = generated[first]
    return begins
