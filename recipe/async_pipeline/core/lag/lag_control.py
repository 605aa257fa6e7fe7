# SPDX-License-Identifier: Apache-2.0
"""Generate fewer batches ahead while the importance weights of what is trained have too small an effective
sample size.

    below the floor    one batch less, and no further decision until what was in flight then is trained
    above it           one batch more, after `CALM` times as many steps

The lag costs nothing where the policy changes slowly, and makes a few samples dominate an update where it
changes fast; the effective sample size, (sum w)^2 / (n sum w^2), falls before learning does (Huang et al.,
Stable Asynchrony, arXiv:2602.17616, which lowers the learning rate by it; here the lag follows it and no step
is made smaller). A step up that had to be taken back doubles the wait for the next one.

Only `depth` changes, within the hard bound of the lag. Pure.
"""

from __future__ import annotations

CALM = 4
"""Decisions above the floor for each one below it."""
MOST_PATIENCE = 64
"""Largest factor of the wait for a step up."""


class LagControl:
    """Decides after each step how many batches may be ahead of it."""

    def __init__(self, floor: float | None, *, least: int, most: int, depth: int | None = None) -> None:
        """`floor`: a share of the sample size, or None to stay at `most`. `depth`: where a resumed run is."""
        self._floor, self._least, self._most = floor, min(least, most), most
        self.depth = most if floor is None or depth is None else max(self._least, min(depth, most))
        self._settled = 0
        """The last step with groups that were admitted before the last change."""
        self._patience, self._good, self._raised = CALM, 0, False

    def trained(self, step: int, share: float | None) -> str | None:
        """Count a step; returns why `depth` has changed, or None.

        `share`: its effective sample size over its sample size, or None if it was not measured.
        """
        if self._floor is None or share is None or step <= self._settled:
            return None
        if share >= self._floor:
            self._good += 1
            if self.depth == self._most or self._good < self._patience * (self.depth + 1):
                return None
            return self._change(step, self.depth + 1, f"it stayed above {self._floor} for {self._good} steps")
        self._good = 0
        if self.depth == self._least:
            return None
        if self._raised:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        return self._change(step, self.depth - 1, f"it fell to {share:.3g}, below {self._floor}")

    def _change(self, step: int, depth: int, why: str) -> str:
        # Groups that are in flight now are trained by as many steps as there are batches ahead.
        self._settled, self._good = step + self.depth + 1, 0
        self._raised, self.depth = depth > self.depth, depth
        return f"{depth} batches are generated ahead: the effective sample size of a step, {why}"
