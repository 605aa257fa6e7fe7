# SPDX-License-Identifier: Apache-2.0
"""Detect that the trainer trains other tokens than the engine generated, turn by turn.

For the same tokens and the same weights, the engine's log-prob and the trainer's differ by rounding only. A
token more or less between two turns, a template that renders a message differently, or a wrong position make
them differ much more, from that turn on. Rewards look the same for a long time, because the policy that
generates is the right one; the gradients are not.

Only turns that the trainer's own version wrote are compared: for others, the policies differ. Answers with a
form differ although the tokens are the same: the engine masks what the form does not permit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...core.groups.items import StepBatch, Trajectory
from .off_policy import Columns, Floats
from .token_versions import Ints, turn_starts, versions_written

SHOWN_TURNS = 8
"""Turns with a separate metric; later ones count in `drift/max` and in the warning."""
BOUNDS = {"float32": 0.05, "other": 1.0}
"""Differences of log-probs above which a token drifts, by the precision of engine and trainer.

In float32, rounding stays below 1e-4 on the toy models of this package; a token too few at the end of a turn
made it 1.9. In bfloat16, single unlikely tokens reach some tenths by rounding.
"""
DRIFTING_SHARE, DRIFTING_TOKENS = 0.02, 2
"""Least share and number of a turn's tokens that drift, for a warning: of a request during which the weights
changed, single tokens may differ.
"""
OF_TOKENS = "the trainer does not see the tokens that the engine saw"
OF_FORMS = (
    "requests asked for a form of the answer (response_format or tool_choice), and the engine masks the "
    "tokens that it does not permit, which the trainer does not; see docs/agents.md, Answers with a form"
)


class TurnDrift(NamedTuple):
    """The compared tokens of one turn, counted from 1, of all trajectories."""

    tokens: int
    drifting: int
    largest: float

    @property
    def drifts(self) -> bool:
        """Whether more tokens differ than rounding explains."""
        return self.drifting >= max(DRIFTING_TOKENS, DRIFTING_SHARE * self.tokens)


class DriftMeter:
    """Measures one optimizer step's batch, which is added in any number of parts."""

    def __init__(self, trainer_version: int, bound: float, with_forms: Collection[str] = ()) -> None:
        """`with_forms`: keys of trajectories that may have answers with a form."""
        self._trainer_version, self._bound, self._with_forms = trainer_version, bound, with_forms
        self._turns: dict[int, TurnDrift] = {}
        self._free: dict[int, TurnDrift] = {}
        """Of trajectories without forms."""

    def add(self, trajectories: Sequence[Trajectory], columns: Columns) -> None:
        """Add some trajectories; ones without log-probs are ignored."""
        if columns.rollout_log_probs is None or columns.old_log_probs is None or not columns.mask.any():
            return
        generated = columns.mask != 0
        written = versions_written(trajectories, columns.lengths, generated)
        versions = np.repeat(written.versions, written.tokens)
        starts = turn_starts(generated, columns.lengths)
        difference: Floats = np.abs(
            np.subtract(columns.old_log_probs, columns.rollout_log_probs, dtype=np.float64)[generated]
        )
        # One number per generated token: which turn of the batch it is in, and which of its trajectory.
        turn_of_token = np.cumsum(starts[generated]) - 1
        first = np.concatenate([[0], np.cumsum(columns.lengths)[:-1]])
        owners = np.searchsorted(first, np.flatnonzero(starts), side="right") - 1
        ordinal = _ordinals(owners)

        # A request that the previous version began has read its prompt with it.
        other = (versions != self._trainer_version) | ~np.isfinite(difference)
        mixed = np.bincount(turn_of_token[other], minlength=ordinal.size) > 0
        usable = ~mixed[turn_of_token]
        turns, difference = ordinal[turn_of_token][usable], difference[usable]
        self._take(self._turns, turns, difference)
        may_have_form = np.array([one.key in self._with_forms for one in trajectories])
        free = ~may_have_form[owners][turn_of_token][usable]
        self._take(self._free, turns[free], difference[free])

    def metrics(self) -> dict[str, float]:
        """Return `drift/max` and `drift/turn_N`; empty if no turn could be compared."""
        if not self._turns:
            return {}
        shown = {f"drift/turn_{n}": self._turns[n].largest for n in sorted(self._turns) if n <= SHOWN_TURNS}
        return {"drift/max": max(turn.largest for turn in self._turns.values()), **shown}

    def warning(self) -> str | None:
        """Return one line that names the first turn that drifts, and why, or None.

        Forms are named only if no turn of a trajectory without them drifts.
        """
        for measured in (self._free, self._turns):
            for n in sorted(measured):
                turn = measured[n]
                if turn.drifts:
                    why = OF_FORMS if measured is self._turns else OF_TOKENS + _where(n)
                    return (
                        f"drift: in turn {n}, log-probs of the engine and of the trainer differ by up to "
                        f"{turn.largest:.3g} on the same weights ({turn.drifting} of {turn.tokens} tokens "
                        f"above {self._bound:g}): {why}"
                    )
        return None

    def _take(self, into: dict[int, TurnDrift], turns: Ints, difference: Floats) -> None:
        for n in np.unique(turns):
            found = difference[turns == n]
            before = into.get(int(n), TurnDrift(0, 0, 0.0))
            into[int(n)] = TurnDrift(
                before.tokens + found.size,
                before.drifting + int(np.count_nonzero(found > self._bound)),
                max(before.largest, float(found.max())),
            )


def bound_of(*precisions: str | None) -> float:
    """Return the bound for an engine and a trainer with these precisions, as a config names them."""
    exact = all(one in ("float32", "fp32") for one in precisions)
    return BOUNDS["float32" if exact else "other"]


def _where(turn: int) -> str:
    if turn == 1:
        return "; compare the prompt's chat template, its length limit and the weights"
    return f"; look at what is inserted between turns {turn - 1} and {turn}"


def _ordinals(owners: npt.NDArray[np.int64]) -> Ints:
    """Return for each turn its number within its trajectory, from 1. `owners`: of each turn, ascending."""
    places = np.arange(owners.size)
    begins = np.ones(owners.size, dtype=bool)
    begins[1:] = owners[1:] != owners[:-1]
    found: Ints = places - np.maximum.accumulate(np.where(begins, places, 0)) + 1
    return found


CLIP_FRACTION = "actor/pg_clipfrac"
CLIPPED_SHARE = 0.02
"""Share of clipped steps above which it is worth a line."""


@dataclass
class PrecisionCheck:
    """Detect that rounding alone reaches the clip range of an image policy.

    A log-prob of an image's step is a mean over the elements of a latent, so ratios are within a thousandth
    of 1 and the clip range is as small. If engine and trainer compute in different precisions, the ratio of
    their log-probs leaves that range although the weights are the same, and the loss clips what should be
    trained. That can be seen in a step whose images were all drawn by the version that trains on them, with
    old log-probs from the rollout and one mini-batch: every ratio of that step should be 1.
    """

    engine: str
    trainer: str
    """The precisions, as the config names them."""
    clip: float
    reported: bool = False

    def warning(self, batch: StepBatch) -> str | None:
        """Return one line if the loss clips a step with images of the trainer's own version, or None."""
        clipped = batch.metrics.get(CLIP_FRACTION)
        if self.reported or clipped is None or batch.first_version < batch.step - 1:
            return None
        if float(clipped) < CLIPPED_SHARE:
            return None
        self.reported = True
        return (
            f"precision: {float(clipped):.0%} of the steps of images are clipped although this version drew "
            f"them: log-probs of the engine ({self.engine}) and of the trainer ({self.trainer}) differ by "
            f"more than the clip range {self.clip:g}; use one precision, or training.old_logp=trainer"
        )
