# SPDX-License-Identifier: Apache-2.0
"""The knobs in a run's settings.json, by their paths."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from ..knobs.schema import AsyncPipelineConfig

OLD_LOGP = "training.old_logp"
PATHS = (
    "strategy",
    "staleness.max_lag",
    "staleness.depth",
    "staleness.oldest_share",
    "staleness.straggler",
    "weight_sync.every",
    "training.ref_refresh_every",
    OLD_LOGP,
)


def as_settings(knobs: AsyncPipelineConfig, old_logp: str | None) -> dict[str, Any]:
    """Return the entries of settings.json. `old_logp` is the policy that the run uses, after all defaults."""
    return {path: attrgetter(path)(knobs) for path in PATHS} | {OLD_LOGP: old_logp}


def of_settings(settings: Mapping[str, Any]) -> AsyncPipelineConfig:
    """Read the knobs back. Raises ConfigError if a value is wrong, and KeyError if an entry is missing."""
    return AsyncPipelineConfig.of({path: settings[path] for path in PATHS})
