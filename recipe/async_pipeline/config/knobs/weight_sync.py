# SPDX-License-Identifier: Apache-2.0
"""The knobs of weight updates; a section of `schema`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ...errors import ConfigError
from ..paths import OWN
from .fields import Bounds, Positive, Seconds, check_fields

InFlightPolicy = Literal["keep", "abort", "drain"]
LOADING_SHARE = 8
"""One replica in this many may load while the others generate."""
SHORT_COMMIT_S = 0.25
"""Replicas need no turns to commit if a commit pauses each for at most this long.

In turns, an update takes one commit for each turn: with eight replicas, eight times as long as at once, and
no prompt is admitted with the version until the last one. What turns gain, that most replicas generate
meanwhile, is less than that if all of them pause for a few steps of an engine only.
"""


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """How new weights reach the rollout replicas."""

    PATH: ClassVar[str] = f"{OWN}.weight_sync"
    MAY_CHANGE: ClassVar[tuple[str, ...]] = (
        "timeout_s",
        "load_staging",
        "max_concurrent_loads",
        "verify_tensors",
        "gather_bucket_size_mb",
        "delta",
        "load_bucket_size_mb",
    )
    """Knobs that a resumed run may have with other values; see `fields`."""

    every: Positive = 1
    """Optimizer steps from one weight update to the next; version numbers count every step."""
    timeout_s: Seconds = 600.0
    """Seconds that one replica may take to prepare one version, and again to load and verify it."""
    in_flight_policy: InFlightPolicy = "keep"
    """What happens to requests in flight when their replica loads new weights: keep (they continue with the
    keys and values that the old weights computed), abort (they restart from the tokens that they have), or
    drain (the load waits for them). Every token's version is recorded in each case."""
    load_staging: Literal["host", "device"] = "host"
    """Where a new version waits until its replica loads it: host memory, or device, a second copy on the
    replica's devices that is filled during generation. Loads from device are shorter and cost the memory of
    the weights on each device."""
    max_concurrent_loads: Annotated[int, Bounds(least=1, remedy="leave it out for the default")] | None = None
    """Replicas that load a version at the same time, while the others generate; all prepare it at once.
    Default: all if their last loads took at most 0.25 s each, else an eighth of them, at least one."""
    reuse_prefixes: Literal[False, True, "session"] = False
    """Which requests may use prefixes that earlier versions cached: none (False), later turns of an episode
    the prefixes of the episode (session), or all (True). It saves reading long conversations again after
    each update, and with True long common prompts too, but tokens then depend on keys and values of other
    versions, which no record shows. With session, no episode begins with such keys and values."""
    verify_tensors: Positive = 16
    """Tensors whose served values are compared with the trainer's after each load, at least: the sample
    rotates, and it is larger if 64 updates would not cover all tensors. Embeddings are compared every
    time."""
    gather_bucket_size_mb: Positive = 512
    """MB of each host bucket that the trainer gathers weights into."""
    delta: bool = False
    """Send versions to other hosts as lossless differences from the version that they have, where that is
    smaller. It pays if the link is slower than a core codes, about 1 GB/s, and steps change few values, as
    at the learning rates of RL in bfloat16. Hosts of training ranks map versions and send nothing."""
    load_bucket_size_mb: Positive = 128
    """MB that a replica loads at a time; bounds the additional device memory of a load."""

    def __post_init__(self) -> None:
        check_fields(self, self.PATH)
        if self.reuse_prefixes and self.in_flight_policy == "abort":
            raise ConfigError(
                f"{self.PATH}.in_flight_policy must be keep or drain with reuse_prefixes="
                f"{self.reuse_prefixes}, got 'abort': what restarts would use the old keys and values"
            )


def concurrent_loads(asked: int | None, replicas: int, commit_s: float | None = None) -> int:
    """Return how many replicas load a version at the same time.

    That is `asked`; by default an eighth, at least one, or all if a commit takes at most `SHORT_COMMIT_S`.
    `commit_s`: seconds of a commit, or None if they are unknown.
    """
    if asked is not None:
        return min(replicas, asked)
    short = commit_s is not None and commit_s <= SHORT_COMMIT_S
    return replicas if short else max(1, replicas // LOADING_SHARE)
