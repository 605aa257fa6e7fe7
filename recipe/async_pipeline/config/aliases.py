# SPDX-License-Identifier: Apache-2.0
"""Keys of other systems: where each may stand, and what it says here. One literal table, at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from ..errors import ConfigError
from .loss_modes import LOSS_OF_VARIANT
from .paths import hint, select
from .placement import (
    PLACED,
    POOLS,
    RATIOS,
    TASK_RATIOS,
    TASKS,
    TOLERANCE,
    check_share,
    role_called,
    wishes_of,
)
from .rollout_correction import CORRECTION, POLICY_LOSS
from .schema import MOST_LAG, OWN, canonical_strategy

_ROLLOUT = "actor_rollout_ref.rollout"
BYPASS = f"{CORRECTION}.bypass_mode"
_BATCH, _MINI_BATCH = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"


@dataclass(frozen=True)
class ForeignKey:
    """A key of another system: where it may stand and what it says here."""

    paths: tuple[str, ...]
    apply: Callable[[Any, Draft], str]


@dataclass
class Draft:
    """Values proposed so far, each with the key that proposed it."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def propose(self, name: str, value: Any, source: str) -> None:
        """Raises ConfigError: another key said something else."""
        if name in self.values and self.values[name] != value:
            raise ConfigError(
                f"{source} asks for {name}={value} but {self.sources[name]} for {self.values[name]}; keep "
                "one of them"
            )
        self.values[name] = value
        self.sources.setdefault(name, source)


def verls_own(raw: Mapping[str, Any], own: Mapping[str, Any], draft: Draft) -> dict[str, Any]:
    """Raises ConfigError: verl's own key names another loss."""
    found: dict[str, Any] = {}
    batches, batch = draft.values.get("require_batches"), select(raw, _BATCH)
    mini = select(raw, _MINI_BATCH)
    if batches is not None and isinstance(mini, int):  # what else it may be, verl's own rules refuse
        batch = found[_BATCH] = batches * mini
    if own.get("single_mini_batch") is True:
        if batches not in (None, 1):
            raise ConfigError(
                f"{OWN}.single_mini_batch=True is one mini-batch a step, but "
                f"{draft.sources['require_batches']} asks for "
                f"{batches}; keep one of them"
            )
        found[_MINI_BATCH] = batch
    if own.get("old_logp") == "rollout":
        found[BYPASS] = True
    elif own.get("old_logp") is not None and select(raw, BYPASS):
        raise ConfigError(
            f"{BYPASS}=True takes old log-probs from the rollout, but {OWN}.old_logp={own['old_logp']}; "
            "keep one of them"
        )
    return found | _loss(raw, draft)


def _loss(raw: Mapping[str, Any], draft: Draft) -> dict[str, Any]:
    mode = draft.values.get("loss_mode")
    if mode is None:
        return {}
    own = select(raw, f"{POLICY_LOSS}.loss_mode")
    if own not in (None, "vanilla", mode):
        raise ConfigError(
            f"{draft.sources['loss_mode']} asks for the loss {mode} but {POLICY_LOSS}.loss_mode for {own}; "
            "keep one of them"
        )
    # ROLL's default, where verl has none.
    tau = (
        {f"{POLICY_LOSS}.dro_beta": 0.1}
        if mode == "dro" and select(raw, f"{POLICY_LOSS}.dro_beta") is None
        else {}
    )
    return {f"{POLICY_LOSS}.loss_mode": mode, **tau}


def quota(draft: Draft, own_every: Any) -> list[str]:
    """The lag that a staleness threshold and a number of steps between publications come down to together.

    verl lets (1 + threshold) x steps x batch groups be in flight or wait; that is one batch more than the
    lag.
    `own_every`: what our own knob says of the steps, if anything; checked later.
    """
    threshold, every = draft.values.get("staleness_threshold"), draft.values.get("sync_every")
    if threshold is None and (every is None or "max_lag" in draft.values):
        return []
    sources = [draft.sources[name] for name in ("staleness_threshold", "sync_every") if name in draft.sources]
    if every is None and isinstance(own_every, int) and own_every > 0:
        every = own_every
        sources.append(f"{OWN}.sync_every")
    batches = (1 + (threshold or 0)) * (every or 1)
    source = " and ".join(sources)
    lag = _propose_lag(batches - 1, draft, source)
    return [
        f"{batches:g} {'batch' if batches == 1 else 'batches'} in flight or waiting, by {source} -> {lag}"
    ]


def groups_of_roles(draft: Draft) -> list[str]:
    """The pools that a list of groups and a list of their shares come down to together."""
    tasks, ratios = draft.values.get("node_tasks"), draft.values.get("node_ratios")
    if tasks is None and ratios is None:
        return []
    if tasks is None:
        raise ConfigError(f"{TASK_RATIOS} has the shares of {TASKS}, got {ratios!r} without it; add it")
    pools = pools_of_tasks(tasks, ratios)
    draft.propose("pools", pools, TASKS)
    return [f"{TASKS} and {TASK_RATIOS} -> {_shown(pools)}"]


def _ratios(value: Any, draft: Draft) -> str:
    pools = pools_of_ratios(value)
    draft.propose("pools", pools, RATIOS)
    return _shown(pools)


def _shown(pools: Mapping[str, Any]) -> str:
    return "pools " + ", ".join(f"{'+'.join(pool['roles'])} {pool['share']:g}" for pool in pools.values())


def _kept(path: str, name: str, meaning: str) -> Callable[[Any, Draft], str]:
    def apply(value: Any, draft: Draft) -> str:
        draft.propose(name, value, path)
        return meaning

    return apply


def _generate_ahead(value: Any, draft: Draft) -> str:
    path = "trainer.generate_ahead_steps"
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_LAG + 1:
        raise ConfigError(
            f"{path} must be a whole number >= 1 and at most {MOST_LAG + 1}, got {value!r}; 1 is "
            "on-policy, 2 is one-step-off"
        )
    return _propose_lag(value - 1, draft, path)


def _generation_ratio(value: Any, draft: Draft) -> str:
    path = "async_generation_ratio"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_LAG:
        raise ConfigError(
            f"{path} must be a number >= 0 and at most {MOST_LAG}, got {value!r}; 0 is on-policy, 1 is one "
            "batch ahead"
        )
    return _propose_lag(float(value), draft, path)


def _propose_lag(batches_ahead: float, draft: Draft, path: str) -> str:
    """A fraction lets that share of a batch be one version older; a whole number all of it."""
    whole, share = divmod(round(batches_ahead, 9), 1)
    lag = int(whole) + (share > 0)
    if lag > MOST_LAG:
        raise ConfigError(
            f"{path} must come to a max_lag of at most {MOST_LAG}, got {lag}; ask for fewer batches ahead"
        )
    draft.propose("max_lag", lag, path)
    draft.propose("oldest_share", share or 1.0, path)
    return f"max_lag={lag}" + (f", oldest_share={share:g}" if share else "")


def _quota_key(path: str, name: str, least: float, *, whole: bool) -> Callable[[Any, Draft], str]:
    def apply(value: Any, draft: Draft) -> str:
        number = isinstance(value, int) or (isinstance(value, float) and not whole)
        if isinstance(value, bool) or not number or not least <= value <= MOST_LAG:
            what = "a whole number" if whole else "a number"
            raise ConfigError(
                f"{path} must be {what} >= {least} and at most {MOST_LAG}, got {value!r}; it belongs to "
                "fully_async"
            )
        draft.propose(name, value, path)
        draft.propose("strategy", "fully_async", path)
        return "strategy=fully_async" + (f", {name}={value}" if name == "sync_every" else "")

    return apply


def _partial_rollout(path: str) -> Callable[[Any, Draft], str]:
    def apply(value: Any, draft: Draft) -> str:
        if not isinstance(value, bool):
            raise ConfigError(
                f"{path} must be True or False, got {value!r}; False drains requests before a load"
            )
        draft.propose("in_flight", "keep" if value else "drain", path)
        return f"in_flight={'keep' if value else 'drain'}"

    return apply


def _with_reward(value: Any, draft: Draft) -> str:
    if not isinstance(value, bool):
        raise ConfigError(
            f"{_ROLLOUT}.with_reward must be True or False, got {value!r}; True scores while generation runs"
        )
    draft.propose("reward_while_generating", value, f"{_ROLLOUT}.with_reward")
    return f"reward_while_generating={value}"


def _strategy_key(path: str) -> Callable[[Any, Draft], str]:
    def apply(value: Any, draft: Draft) -> str:
        name = canonical_strategy(value, path)
        draft.propose("strategy", name, path)
        return f"strategy={name}"

    return apply


def _size_mb(path: str, name: str) -> Callable[[Any, Draft], str]:
    def apply(value: Any, draft: Draft) -> str:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{path} must be a whole number of MB >= 1, got {value!r}; leave it out for the default"
            )
        draft.propose(name, value, path)
        return f"{name}={value}"

    return apply


def _pg_variant(path: str) -> Callable[[Any, Draft], str]:
    def apply(value: Any, draft: Draft) -> str:
        if not isinstance(value, str) or value not in LOSS_OF_VARIANT:
            raise ConfigError(
                f"{path} must be one of {', '.join(LOSS_OF_VARIANT)}, got "
                f"{value!r}{hint(value, LOSS_OF_VARIANT)}; "
                f"verl's other losses are named by {POLICY_LOSS}.loss_mode"
            )
        draft.propose("loss_mode", LOSS_OF_VARIANT[value], path)
        return f"loss_mode={LOSS_OF_VARIANT[value]}"

    return apply


def _require_batches(path: str) -> Callable[[Any, Draft], str]:
    def apply(value: Any, draft: Draft) -> str:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{path} must be a whole number >= 1, got {value!r}; a step takes as many mini-batches"
            )
        draft.propose("require_batches", value, path)
        return f"{_BATCH} of {value} x {_MINI_BATCH}"

    return apply


def _must_be(path: str, wanted: Any, meaning: str, remedy: str) -> Callable[[Any, Draft], str]:
    def apply(value: Any, draft: Draft) -> str:
        if value != wanted:
            raise ConfigError(f"{path} must be {wanted!r} with this pipeline, got {value!r}; {remedy}")
        return meaning

    return apply


FOREIGN: tuple[ForeignKey, ...] = (
    *(ForeignKey((p,), _strategy_key(p)) for p in ("async_strategy", "actor_rollout_ref.async_strategy")),
    ForeignKey(("trainer.generate_ahead_steps",), _generate_ahead),
    ForeignKey(("async_generation_ratio",), _generation_ratio),
    ForeignKey(
        (f"{_ROLLOUT}.enable_dual_buffer",),
        _must_be(
            f"{_ROLLOUT}.enable_dual_buffer",
            True,
            "weights always go through the dual buffer",
            "leave it out, or train with stock verl",
        ),
    ),
    ForeignKey(
        (f"{_ROLLOUT}.with_reward",),
        _with_reward,
    ),
    ForeignKey(
        (f"{_ROLLOUT}.param_update_preduce_bucket_size_mb",),
        _size_mb(f"{_ROLLOUT}.param_update_preduce_bucket_size_mb", "preduce_bucket_size_mb"),
    ),
    ForeignKey(
        (f"{_ROLLOUT}.param_update_consume_bucket_size_mb",),
        _size_mb(f"{_ROLLOUT}.param_update_consume_bucket_size_mb", "consume_bucket_size_mb"),
    ),
    *(
        ForeignKey((path,), _quota_key(path, name, least, whole=whole))
        for prefix in ("", "async_training.")
        for name, path, least, whole in (
            ("staleness_threshold", f"{prefix}staleness_threshold", 0, False),
            ("sync_every", f"{prefix}trigger_parameter_sync_step", 1, True),
        )
    ),
    *(
        ForeignKey((path,), _require_batches(path))
        for path in ("require_batches", "async_training.require_batches")
    ),
    *(
        ForeignKey((path,), _pg_variant(path))
        for path in ("pg_variant", "actor_rollout_ref.actor.pg_variant")
    ),
    *(
        ForeignKey((path,), _partial_rollout(path))
        for path in ("partial_rollout", "async_training.partial_rollout")
    ),
    ForeignKey((RATIOS,), _ratios),
    ForeignKey((TASKS,), _kept(TASKS, "node_tasks", "roles of pools")),
    ForeignKey((TASK_RATIOS,), _kept(TASK_RATIOS, "node_ratios", "shares of pools")),
)


def pools_of_ratios(ratios: Any, path: str = RATIOS) -> dict[str, dict[str, Any]]:
    """`[train, logp, ref_logp, generate]`: equal neighbours of the first three share a pool where all then
    sum to 1.

    So `[0.5, 0.5, 0.5, 0.5]` is one pool for the three and one for generation, `[0.25, 0.25, 0.25, 0.25]`
    four pools.
    Raises ConfigError.
    """
    if not isinstance(ratios, Sequence) or isinstance(ratios, str) or len(ratios) != 4:
        raise ConfigError(
            f"{path} must be [train, logp, ref_logp, generate], got {ratios!r}; e.g. [0.5,0.5,0.5,0.5]"
        )
    for ratio in ratios:
        check_share(ratio, path)
    train, logp, ref, generate = (float(ratio) for ratio in ratios)
    shares = (train, logp, ref)
    fitting = []
    for cuts in (cut for size in range(3) for cut in combinations((1, 2), size)):
        groups = [shares[a:b] for a, b in zip((0, *cuts), (*cuts, 3), strict=True)]
        equal = all(max(group) - min(group) < TOLERANCE for group in groups)
        if equal and abs(sum(group[0] for group in groups) + generate - 1) < TOLERANCE:
            fitting.append(groups)
    if len(fitting) != 1:
        why = "no sharing of pools makes them sum to 1"
        if fitting:
            why = (
                f"they sum to 1 in {len(fitting)} ways, "
                f"{' and '.join(_as_shared(groups) for groups in fitting)}"
            )
        raise ConfigError(
            f"{path}: {why}, got {list(ratios)}; where neighbours of train, logp, ref_logp are equal they "
            f"may share a pool; or set {POOLS}"
        )
    names, pools = iter(("train", "logp", "ref_logp")), {}
    for group in fitting[0]:
        roles = [next(names) for _ in group]
        pools[roles[0]] = {"roles": roles, "share": group[0]}
    return pools | {"generate": {"roles": ["generate"], "share": generate}}


def _as_shared(groups: Sequence[Sequence[float]]) -> str:
    names = iter(("train", "logp", "ref_logp"))
    return " | ".join("+".join(next(names) for _ in group) for group in groups)


def pools_of_tasks(tasks: Any, ratios: Any) -> dict[str, dict[str, Any]]:
    """`[[logp, actor-train], ref_logp, generate]` with a share for each entry. Raises ConfigError."""
    if not isinstance(tasks, Sequence) or isinstance(tasks, str) or not tasks:
        raise ConfigError(
            f"{TASKS} must be a list of roles and lists of roles, got {tasks!r}; e.g. "
            "[[logp,actor-train],ref_logp,generate]"
        )
    if not isinstance(ratios, Sequence) or isinstance(ratios, str) or len(ratios) != len(tasks):
        raise ConfigError(
            f"{TASK_RATIOS} must have a share for each of the {len(tasks)} entries of {TASKS}, got "
            f"{ratios!r}; add it"
        )
    pools: dict[str, dict[str, Any]] = {}
    for task, ratio in zip(tasks, ratios, strict=True):
        roles = sorted(
            (role_called(role, TASKS) for role in (task if isinstance(task, list | tuple) else [task])),
            key=PLACED.index,
        )
        check_share(ratio, TASK_RATIOS)
        name = roles[0] if roles else ""
        if name in pools:
            raise ConfigError(f"{TASKS} names {name} twice, got {tasks!r}; a role is on one pool")
        pools[name] = {"roles": roles, "share": float(ratio)}
    wishes_of(pools, TASKS)
    return pools
