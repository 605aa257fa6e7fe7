# SPDX-License-Identifier: Apache-2.0
"""Translate keys of other systems into knobs: one literal table, `FOREIGN`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError
from .agentic import agent_loop_for
from .foreign_keys import Draft, ForeignKey
from .foreign_pools import pools_of_ratios, pools_of_tasks
from .image_aliases import IMAGE_KEYS, losses_of_images
from .loss_modes import LOSS_OF_VARIANT
from .paths import OWN, hint, select
from .placement import RATIOS, TASK_RATIOS, TASKS
from .rollout_correction import CORRECTION, POLICY_LOSS
from .schema import MOST_LAG, canonical_strategy

_ROLLOUT = "actor_rollout_ref.rollout"
BYPASS = f"{CORRECTION}.bypass_mode"
_BATCH, _MINI_BATCH = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
LAG, SHARE = "staleness.max_lag", "staleness.oldest_share"
EVERY, IN_FLIGHT_POLICY = "weight_sync.every", "weight_sync.in_flight_policy"
WHILE_GENERATING = "reward.while_generating"


def verls_own(raw: Mapping[str, Any], own: Mapping[str, Any], draft: Draft) -> dict[str, Any]:
    """Return values for verl's own keys, by their paths. Raises ConfigError if the user's keys disagree."""
    found: dict[str, Any] = {}
    batches, batch = draft.values.get("require_batches"), select(raw, _BATCH)
    mini = select(raw, _MINI_BATCH)

    if batches is not None and isinstance(mini, int):  # verl's own rules refuse other types
        batch = found[_BATCH] = batches * mini
    if own.get("training.single_mini_batch") is True:
        if batches not in (None, 1):
            raise ConfigError(
                f"{OWN}.training.single_mini_batch=True means one mini-batch per step, but "
                f"{draft.sources['require_batches']} asks for {batches}; keep one of them"
            )
        found[_MINI_BATCH] = batch

    if own.get("training.old_logp") == "rollout":
        found[BYPASS] = True
    elif own.get("training.old_logp") is not None and select(raw, BYPASS):
        raise ConfigError(
            f"{BYPASS}=True takes old log-probs from the rollout, but "
            f"{OWN}.training.old_logp={own['training.old_logp']}; keep one of them"
        )
    of_images = draft.verl | losses_of_images(raw)
    return found | of_images | _loss(raw, draft) | agent_loop_for(own, raw)


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
    # ROLL's default; verl has no default.
    tau = (
        {f"{POLICY_LOSS}.dro_beta": 0.1}
        if mode == "dro" and select(raw, f"{POLICY_LOSS}.dro_beta") is None
        else {}
    )
    return {f"{POLICY_LOSS}.loss_mode": mode, **tau}


def quota(draft: Draft, own_every: Any) -> list[str]:
    """Propose the lag that a staleness threshold and the steps per weight update result in.

    verl permits (1 + threshold) x steps x batch groups in flight or waiting, which is one batch more than
    the lag. `own_every` is the value of our knob for the steps, or None; it is checked later.
    """
    threshold, every = draft.values.get("staleness_threshold"), draft.values.get(EVERY)
    if threshold is None and (every is None or LAG in draft.values):
        return []
    sources = [draft.sources[name] for name in ("staleness_threshold", EVERY) if name in draft.sources]
    if every is None and isinstance(own_every, int) and own_every > 0:
        every = own_every
        sources.append(f"{OWN}.{EVERY}")
    batches = (1 + (threshold or 0)) * (every or 1)
    source = " and ".join(sources)
    lag = _propose_lag(batches - 1, draft, source)
    return [f"{source}: {batches:g} {'batch' if batches == 1 else 'batches'} in flight or waiting -> {lag}"]


def groups_of_roles(draft: Draft) -> list[str]:
    """Propose the pools that a list of groups and a list of their shares describe."""
    tasks, ratios = draft.values.get("node_tasks"), draft.values.get("node_ratios")
    if tasks is None and ratios is None:
        return []
    if tasks is None:
        raise ConfigError(f"{TASK_RATIOS} requires {TASKS}, got {ratios!r} without it; add it")
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
    """Propose a lag. The fraction is the share of a batch that may be one version older."""
    whole, share = divmod(round(batches_ahead, 9), 1)
    lag = int(whole) + (share > 0)
    if lag > MOST_LAG:
        raise ConfigError(
            f"{path} must result in a max_lag of at most {MOST_LAG}, got {lag}; ask for fewer batches ahead"
        )
    draft.propose(LAG, lag, path)
    draft.propose(SHARE, share or 1.0, path)
    return f"{LAG}={lag}" + (f", {SHARE}={share:g}" if share else "")


def _quota_key(path: str, name: str, least: float, *, whole: bool) -> Callable[[Any, Draft], str]:
    def apply(value: Any, draft: Draft) -> str:
        number = isinstance(value, int) or (isinstance(value, float) and not whole)
        if isinstance(value, bool) or not number or not least <= value <= MOST_LAG:
            what = "a whole number" if whole else "a number"
            raise ConfigError(
                f"{path} must be {what} >= {least} and at most {MOST_LAG}, got {value!r}; it is "
                "an option of fully_async"
            )
        draft.propose(name, value, path)
        draft.propose("strategy", "fully_async", path)
        return "strategy=fully_async" + (f", {name}={value}" if name == EVERY else "")

    return apply


def _partial_rollout(path: str) -> Callable[[Any, Draft], str]:
    def apply(value: Any, draft: Draft) -> str:
        if not isinstance(value, bool):
            raise ConfigError(
                f"{path} must be True or False, got {value!r}; False lets requests finish before a load"
            )
        policy = "keep" if value else "drain"
        draft.propose(IN_FLIGHT_POLICY, policy, path)
        return f"{IN_FLIGHT_POLICY}={policy}"

    return apply


def _with_reward(value: Any, draft: Draft) -> str:
    if not isinstance(value, bool):
        raise ConfigError(
            f"{_ROLLOUT}.with_reward must be True or False, got {value!r}; True scores while generation runs"
        )
    draft.propose(WHILE_GENERATING, value, f"{_ROLLOUT}.with_reward")
    return f"{WHILE_GENERATING}={value}"


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
                f"{value!r}{hint(value, LOSS_OF_VARIANT)}; set verl's other losses by {POLICY_LOSS}.loss_mode"
            )
        draft.propose("loss_mode", LOSS_OF_VARIANT[value], path)
        return f"loss_mode={LOSS_OF_VARIANT[value]}"

    return apply


def _require_batches(path: str) -> Callable[[Any, Draft], str]:
    def apply(value: Any, draft: Draft) -> str:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{path} must be a whole number >= 1, got {value!r}; it is the mini-batches of one step"
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


_NESTED = "async_training."
"""Section of verl's fully asynchronous trainer; some of its keys are understood."""
_TOP, _ACTOR = ("", "actor_rollout_ref."), ("", "actor_rollout_ref.actor.")

FOREIGN: tuple[ForeignKey, ...] = (
    *(
        ForeignKey(
            f"{prefix}async_strategy",
            _strategy_key(f"{prefix}async_strategy"),
            sets=("strategy", LAG),
            meaning=""
            if prefix
            else "`strategy`; spellings such as `one-step-off` and `naive` are understood",
        )
        for prefix in _TOP
    ),
    ForeignKey(
        "trainer.generate_ahead_steps",
        _generate_ahead,
        sets=("strategy", LAG, SHARE),
        meaning=f"`{LAG}`: the value minus 1, so that 2 is one-step-off",
    ),
    ForeignKey(
        "async_generation_ratio",
        _generation_ratio,
        sets=("strategy", LAG, SHARE),
        meaning=f"`{LAG}`: the value rounded up; `{SHARE}`: its fraction",
    ),
    ForeignKey(
        f"{_ROLLOUT}.enable_dual_buffer",
        _must_be(
            f"{_ROLLOUT}.enable_dual_buffer",
            True,
            "weights always use the dual buffer",
            "leave it out, or train with stock verl",
        ),
        meaning="nothing: weights always use the dual buffer; False is an error",
    ),
    ForeignKey(
        f"{_ROLLOUT}.with_reward", _with_reward, sets=(WHILE_GENERATING,), meaning=f"`{WHILE_GENERATING}`"
    ),
    *(
        ForeignKey(
            f"{_ROLLOUT}.param_update_{theirs}_bucket_size_mb",
            _size_mb(f"{_ROLLOUT}.param_update_{theirs}_bucket_size_mb", ours),
            sets=(ours,),
            meaning=f"`{ours}`",
        )
        for theirs, ours in (
            ("preduce", "weight_sync.gather_bucket_size_mb"),
            ("consume", "weight_sync.load_bucket_size_mb"),
        )
    ),
    *(
        ForeignKey(
            f"{prefix}{theirs}",
            _quota_key(f"{prefix}{theirs}", name, least, whole=whole),
            sets=("strategy", LAG, SHARE, *more),
            meaning="" if prefix else meaning,
        )
        for prefix in ("", _NESTED)
        for name, theirs, least, whole, more, meaning in (
            (
                "staleness_threshold",
                "staleness_threshold",
                0,
                False,
                (),
                f"`strategy=fully_async`; `{LAG}` and `{SHARE}`: (1 + value) * k - 1, with k steps per "
                "weight update",
            ),
            (
                EVERY,
                "trigger_parameter_sync_step",
                1,
                True,
                (EVERY,),
                f"`strategy=fully_async`, `{EVERY}`, and `{LAG}` as above",
            ),
        )
    ),
    *(
        ForeignKey(
            f"{prefix}require_batches",
            _require_batches(f"{prefix}require_batches"),
            meaning="" if prefix else f"`{_BATCH}`: that many times `{_MINI_BATCH}`",
        )
        for prefix in ("", _NESTED)
    ),
    *(
        ForeignKey(
            f"{prefix}pg_variant",
            _pg_variant(f"{prefix}pg_variant"),
            meaning="" if prefix else f"`{POLICY_LOSS}.loss_mode`; one of {', '.join(LOSS_OF_VARIANT)}",
        )
        for prefix in _ACTOR
    ),
    *(
        ForeignKey(
            f"{prefix}partial_rollout",
            _partial_rollout(f"{prefix}partial_rollout"),
            sets=(IN_FLIGHT_POLICY,),
            meaning="" if prefix else f"`{IN_FLIGHT_POLICY}`: keep, or drain if False",
        )
        for prefix in ("", _NESTED)
    ),
    ForeignKey(RATIOS, _ratios, sets=("pools",), meaning="`pools`; `[train, logp, ref_logp, generate]`"),
    ForeignKey(
        TASKS,
        _kept(TASKS, "node_tasks", "roles of pools"),
        sets=("pools",),
        meaning=f"`pools`, with `{TASK_RATIOS}`",
    ),
    ForeignKey(TASK_RATIOS, _kept(TASK_RATIOS, "node_ratios", "shares of pools"), sets=("pools",)),
    *IMAGE_KEYS,
)
SET_BY_OTHERS: frozenset[str] = frozenset(path for key in FOREIGN for path in key.sets)
"""Knobs that our YAML leaves null, so that any other value there was written by the user."""
