# SPDX-License-Identifier: Apache-2.0
"""Latencies and lengths drawn from a seeded lognormal: the same for the same request in every arm."""

from __future__ import annotations

import math
from statistics import NormalDist

import msgspec
import xxhash

from ..errors import ConfigError

_UNIFORM = 2**64


class Lognormal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """exp(N(ln median, sigma)), cut off at `cap`. In seconds or in tokens, as the key that holds it says."""

    median: float
    sigma: float
    cap: float

    def __post_init__(self) -> None:
        if not (0 < self.median <= self.cap and self.sigma >= 0):
            raise ConfigError(
                f"a lognormal needs 0 < median <= cap and sigma >= 0, got median={self.median:g} "
                f"sigma={self.sigma:g} cap={self.cap:g}; mend it in the workload's file"
            )

    def draw(self, seed: int, *key: object) -> float:
        """The value for one request, which `key` names. The same arguments give the same value."""
        name = ":".join(map(str, (seed, *key)))
        uniform = (xxhash.xxh3_64_intdigest(name.encode()) + 0.5) / _UNIFORM
        return min(self.cap, self.median * math.exp(self.sigma * NormalDist().inv_cdf(uniform)))
