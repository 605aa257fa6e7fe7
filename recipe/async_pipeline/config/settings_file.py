# SPDX-License-Identifier: Apache-2.0
"""The knobs in a run's settings.json. The names in this file do not change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .names import RENAMED
from .schema import AsyncPipelineConfig

NAMES = (
    "strategy",
    "max_lag",
    "depth",
    "oldest_share",
    "stale",
    "sync_every",
    "ref_refresh_every",
    "old_logp",
)
STALE = {"wait": "wait", "regenerate": "resume", "drop": "drop", "mask": "mask"}
"""Values of `staleness.straggler`, and their names in files."""


def as_settings(knobs: AsyncPipelineConfig, old_logp: str | None) -> dict[str, Any]:
    """Return the entries of settings.json. `old_logp` is the policy that the run uses, after all defaults."""
    staleness = knobs.staleness
    return {
        "strategy": knobs.strategy,
        "max_lag": staleness.max_lag,
        "depth": staleness.depth,
        "oldest_share": staleness.oldest_share,
        "stale": STALE[staleness.straggler],
        "sync_every": knobs.weight_sync.every,
        "ref_refresh_every": knobs.training.ref_refresh_every,
        "old_logp": old_logp,
    }


def of_settings(settings: Mapping[str, Any]) -> AsyncPipelineConfig:
    """Read the knobs back. Raises ConfigError if a value is wrong, and KeyError if an entry is missing."""
    # Earlier versions did not write ref_refresh_every.
    there = [name for name in NAMES if name in settings or name != "ref_refresh_every"]
    values = {RENAMED.get(name, name): settings[name] for name in there}
    straggler = {file: ours for ours, file in STALE.items()}
    path = RENAMED["stale"]
    values[path] = straggler.get(values[path], values[path])
    return AsyncPipelineConfig.of(values)
