# SPDX-License-Identifier: Apache-2.0
"""Detect that rounding alone reaches the clip range of an image policy.

A log-prob of an image's step is a mean over the elements of a latent, so ratios are within a thousandth of 1
and the clip range is as small. If engine and trainer compute in different precisions, the ratio of their
log-probs leaves that range although the weights are the same, and the loss clips what should be trained. That
can be seen in a step whose images were all drawn by the version that trains on them, with old log-probs from
the rollout and one mini-batch: every ratio of that step should be 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.groups.items import StepBatch

CLIP_FRACTION = "actor/pg_clipfrac"
CLIPPED_SHARE = 0.02
"""Share of clipped steps above which it is worth a line."""


@dataclass
class PrecisionCheck:
    """Looks at each step; reports once."""

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
