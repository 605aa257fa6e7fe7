# SPDX-License-Identifier: Apache-2.0
"""Draw latencies and lengths from a seeded lognormal; a request has the same value in every arm."""

from __future__ import annotations

import math
from statistics import NormalDist

import msgspec
import xxhash

from ....errors import ConfigError

_UNIFORM = 2**64


class LognormalWait(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The distribution exp(N(ln median, sigma)), limited to `cap`; its key determines seconds or tokens."""

    median: float
    sigma: float
    cap: float

    def __post_init__(self) -> None:
        if not (0 < self.median <= self.cap and self.sigma >= 0):
            raise ConfigError(
                f"a lognormal needs 0 < median <= cap and sigma >= 0, got median={self.median:g} "
                f"sigma={self.sigma:g} cap={self.cap:g}; correct the workload's file"
            )

    def draw(self, seed: int, *key: object) -> float:
        """Return the value for the request named by `key`; equal arguments give equal values."""
        name = ":".join(map(str, (seed, *key)))
        uniform = (xxhash.xxh3_64_intdigest(name.encode()) + 0.5) / _UNIFORM
        return min(self.cap, self.median * math.exp(self.sigma * NormalDist().inv_cdf(uniform)))
