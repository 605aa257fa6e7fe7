# SPDX-License-Identifier: Apache-2.0
"""one_step_off: batch s+1 is generated while step s trains. Lag at most 1."""

from __future__ import annotations

from typing import ClassVar

from ..core.schedule import Schedule


class OneStepOff(Schedule):
    """Generate one batch while the one before trains; the first batch has lag 0.

    Source: Noukhovitch et al., "Asynchronous RLHF", arXiv 2410.18252.
    """

    implied_lag: ClassVar[int | None] = 1
