# SPDX-License-Identifier: Apache-2.0
"""n_step_ahead: up to n+1 batches are generated while one trains. Lag at most n = max_lag."""

from __future__ import annotations

from ..core.schedule import Schedule


class NStepAhead(Schedule):
    """Generate n later batches while the longest response of a batch is awaited.

    More than ceil(longest response / step time) batches ahead only add staleness.
    """
