# SPDX-License-Identifier: Apache-2.0
"""What follows from the knobs: the schedule, settings.json, open requests, the policy of old log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from ...core.schedule import Schedule
from ...errors import ConfigError
from ...strategies import schedule_class
from ..knobs.schema import AsyncPipelineConfig
from ..paths import OWN, select
from ..placement import POOLS, Placement


def schedule_of(
    knobs: AsyncPipelineConfig, *, strategy: type[Schedule] | None = None, **of_the_run: Any
) -> Schedule:
    """Return the schedule that the knobs ask for.

    `strategy` replaces the class that `knobs.strategy` names. `of_the_run` holds the fields that are not
    knobs: `batch`, `last_step`, `first_step`, `old_logp`, `validate_every`, `validate_first`, `save_every`.
    Raises ConfigError if the strategy cannot be imported or has no schedule.
    """
    cls, staleness = strategy or schedule_class(knobs.strategy), knobs.staleness
    return cls(
        max_lag=staleness.max_lag,
        depth=staleness.depth,
        ess_floor=staleness.ess_floor,
        oldest_share=staleness.oldest_share,
        straggler=staleness.straggler,
        sync_every=knobs.weight_sync.every,
        ref_refresh_every=knobs.training.ref_refresh_every,
        **of_the_run,
    )


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


QUEUED = 2
"""Requests on a replica for each that its engine generates: the next ones are there when one ends."""


class OpenRequests(NamedTuple):
    """Bounds of one run.

    How many requests may be open on a replica, and how many groups in an agent loop worker.

    Each agent loop worker chooses the replicas of its requests, so the bound of a replica is divided among
    the workers. The shares are fixed: a worker with more groups than another has no larger share. Groups are
    dealt to the workers in turn, so their numbers differ by one at most, and by default the shares together
    are twice what the engine generates at once: it runs dry only if some workers have no requests while
    others have more than twice the average.
    """

    share: int
    """Open requests of one agent loop worker on one replica."""
    per_replica: int
    """The shares of all workers that can have groups."""
    groups: int
    """Groups in flight, which may all be in one worker."""

    @classmethod
    def of(
        cls,
        knobs: AsyncPipelineConfig,
        *,
        engine_slots: int,
        workers: int,
        groups_per_step: int,
        responses_per_group: int,
    ) -> OpenRequests:
        """Return the bounds; `engine_slots` are the requests that one replica generates at once."""
        groups = groups_per_step * (1 + knobs.staleness.max_lag)
        # With fewer groups than workers, some workers have none.
        busy = min(workers, groups)
        bound = knobs.rollout.max_open_requests
        if bound is None:
            # The last group of a step fits, although only its worker has requests then.
            bound = max(QUEUED * engine_slots, busy * min(responses_per_group, engine_slots))
        share = max(1, bound // busy)
        return cls(share=share, per_replica=share * busy, groups=groups)


_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_READERS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (f"{_ACTOR}.ppo_epochs", (None, 1), "the later updates of a step need them"),
    ("algorithm.use_kl_in_reward", (None, False), "the reward needs them"),
    (f"{_CORRECTION}.rollout_rs", (None,), "tokens are masked before the update"),
    (f"{_CORRECTION}.rollout_is_batch_normalize", (None, False), "weights are scaled before the update"),
    (
        f"{_ACTOR}.strategy",
        ("fsdp", "fsdp2", "megatron"),
        "this was tried with fsdp, fsdp2 and megatron only",
    ),
    (f"{_ACTOR}.megatron.router_replay.mode", (None, "disabled", "R3"), "they record the routes"),
    ("distillation.enabled", (None, False), "verl's loss of distillation reads them"),
    ("trainer.critic_warmup", (None, 0), "the first steps have no update"),
    (f"{OWN}.custom_stages", (None, (), []), "custom stages may read them"),
)
"""Keys, values with which nothing reads old log-probs before the update, and what does otherwise."""


def read_before_update(config: Mapping[str, Any]) -> str | None:
    """Return what needs the old log-probs before the update, as `KEY=VALUE, because REASON`, or None.

    `config` is verl's, resolved.
    """
    batch, mini = (select(config, key) for key in ("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size"))
    if mini is not None and batch != mini:
        return f"{_ACTOR}.ppo_mini_batch_size={mini}, because the later updates of a step need them"
    if (engine := select(config, "actor_rollout_ref.rollout.name")) == "diffusers":
        return f"actor_rollout_ref.rollout.name={engine}, because a picture has a log-prob for each step"
    for path, free, why in _READERS:
        if (value := select(config, path)) not in free:
            return f"{path}={value}, because {why}"
    return None


def proximal_policy(
    knobs: AsyncPipelineConfig, placement: Placement, *, bypass: bool, reader: str | None
) -> str:
    """Return the policy of old log-probs, one of `core.schedule.OldLogpSource`.

    `bypass` means that verl uses the log-probs of the rollout; `reader` is what needs them before the update,
    or None. Raises ConfigError if the placement or the reader does not permit the chosen policy.
    """
    path, pool = f"{OWN}.training.old_logp", placement.own_pool_of("logp")
    if bypass:
        return "rollout"
    if knobs.training.old_logp == "auto":
        if pool is not None:
            return "logp_pool" if knobs.staleness.max_lag > 0 else "trainer"
        return "update" if reader is None else "trainer"
    if knobs.training.old_logp == "update" and (reader is not None or pool is not None):
        why = f"with {reader}" if reader is not None else "with a pool for logp"
        raise ConfigError(f"{path} must not be update {why}; use auto")
    if knobs.training.old_logp == "logp_pool" and pool is None:
        raise ConfigError(
            f"{path}=logp_pool requires a pool for logp, which shares the training devices; add one to "
            f"{POOLS}, or use auto"
        )
    if knobs.training.old_logp == "logp_pool" and knobs.staleness.max_lag == 0:
        raise ConfigError(
            f"{path}=logp_pool requires {OWN}.staleness.max_lag > 0, got 0, because its policy is older than "
            "the one that generates; use trainer, or raise max_lag"
        )
    if knobs.training.old_logp == "trainer" and pool is not None and knobs.weight_sync.every > 1:
        raise ConfigError(
            f"{path}=trainer with a pool for logp requires {OWN}.weight_sync.every=1, got "
            f"{knobs.weight_sync.every}; set it, or use logp_pool"
        )
    return knobs.training.old_logp
