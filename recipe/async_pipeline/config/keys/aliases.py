# SPDX-License-Identifier: Apache-2.0
"""Translate keys of other systems that a run understands: one literal table, `FOREIGN`.

Keys of whole files of other systems, which are translated before a run, are in `tools.translate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ..checks.rollout_correction import CORRECTION, POLICY_LOSS
from ..knobs.agentic import agent_loop_for
from ..knobs.schema import MOST_LAG, canonical_strategy, knob_paths
from ..paths import OWN, hint, select
from ..placement import TASK_RATIOS, TASKS
from .foreign_keys import (
    LOSS_OF_VARIANT,
    Document,
    Draft,
    ForeignKey,
    Outcome,
    Takes,
    WrongValue,
    left_out,
    pools_of_ratios,
    pools_of_tasks,
    required,
    to,
)

BYPASS = f"{CORRECTION}.bypass_mode"
_BATCH, _MINI_BATCH = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
_LOSS_MODE = f"{POLICY_LOSS}.loss_mode"
LAG, SHARE = "staleness.max_lag", "staleness.oldest_share"
EVERY, IN_FLIGHT_POLICY = "weight_sync.every", "weight_sync.in_flight_policy"
WHILE_GENERATING = "reward.while_generating"
FLOW_GRPO = "flow_grpo"


# What keys result in together.


def verls_own(raw: Mapping[str, Any], own: Mapping[str, Any], draft: Draft) -> dict[str, Any]:
    """Return values for verl's own keys, by their paths. Raises ConfigError if the user's keys disagree."""
    found: dict[str, Any] = {}
    batches, mini = draft.values.get("require_batches"), select(raw, _MINI_BATCH)
    if batches is not None and isinstance(mini, int):  # verl's own rules refuse other types
        found[_BATCH] = batches * mini
    if own.get("training.old_logp") == "rollout":
        found[BYPASS] = True
    elif own.get("training.old_logp") not in (None, "auto") and select(raw, BYPASS):
        raise ConfigError(
            f"{BYPASS}=True takes old log-probs from the rollout, but "
            f"{OWN}.training.old_logp={own['training.old_logp']}; keep one of them"
        )
    found |= {path: v for path, v in draft.values.items() if "." in path and path not in knob_paths()}
    return found | losses_of_images(raw) | _loss(raw, draft) | agent_loop_for(own, raw)


def _loss(raw: Mapping[str, Any], draft: Draft) -> dict[str, Any]:
    mode = draft.values.get("loss_mode")
    if mode is None:
        return {}
    own = select(raw, _LOSS_MODE)
    if own not in (None, "vanilla", mode):
        raise ConfigError(
            f"{draft.sources['loss_mode']} asks for the loss {mode} but {_LOSS_MODE} for {own}; "
            "keep one of them"
        )
    # ROLL's default; verl has no default.
    beta = f"{POLICY_LOSS}.dro_beta"
    return {_LOSS_MODE: mode} | ({beta: 0.1} if mode == "dro" and select(raw, beta) is None else {})


def losses_of_images(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss of verl that `loss_mode=flow_grpo` means: its own, since a step is a token."""
    return {_LOSS_MODE: "vanilla"} if select(raw, _LOSS_MODE) == FLOW_GRPO else {}


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
    try:
        lag = _lag_of(batches - 1)
    except WrongValue as error:
        raise ConfigError(f"{source} {error}") from None
    for name, value in lag.overrides.items():
        draft.propose(name, value, source)
    counted = f"{batches:g} {'batch' if batches == 1 else 'batches'} in flight or waiting"
    return [f"{source}: {counted} -> {lag.describe()}"]


def groups_of_roles(draft: Draft) -> list[str]:
    """Propose the pools that a list of groups and a list of their shares describe."""
    tasks, ratios = draft.values.get("node_tasks"), draft.values.get("node_ratios")
    if tasks is None and ratios is None:
        return []
    if tasks is None:
        raise ConfigError(f"{TASK_RATIOS} requires {TASKS}, got {ratios!r} without it; add it")
    pools = pools_of_tasks(tasks, ratios)
    draft.propose("pools", pools, TASKS)
    return [f"{TASKS} and {TASK_RATIOS} -> {_describe_pools(pools)}"]


def _describe_pools(pools: Mapping[str, Any]) -> str:
    return "pools " + ", ".join(f"{'+'.join(pool['roles'])} {pool['share']:g}" for pool in pools.values())


# Rules of single keys.


def _lag_of(batches_ahead: float) -> Outcome:
    """Return a lag. The fraction is the share of a batch that may be one version older."""
    whole, share = divmod(round(batches_ahead, 9), 1)
    lag = int(whole) + (share > 0)
    if lag > MOST_LAG:
        raise WrongValue(
            f"must result in a max_lag of at most {MOST_LAG}, got {lag}; ask for fewer batches ahead"
        )
    text = f"{LAG}={lag}" + (f", {SHARE}={share:g}" if share else "")
    return Outcome("set", {LAG: lag, SHARE: share or 1.0}, text)


def _number(least: float, most: float, remedy: str, *, whole: bool = False) -> Takes:
    def holds(value: Any) -> bool:
        number = isinstance(value, int) or (isinstance(value, float) and not whole)
        return number and not isinstance(value, bool) and least <= value <= most

    what = "a whole number" if whole else "a number"
    return Takes(
        holds, f"{what} >= {least}" + (f" and at most {most}" if most < float("inf") else ""), remedy
    )


_STEPS_AHEAD = _number(1, MOST_LAG + 1, "1 is on-policy, 2 is one-step-off", whole=True)
_BATCHES_AHEAD = _number(0, MOST_LAG, "0 is on-policy, 1 is one batch ahead")
_THRESHOLD = _number(0, MOST_LAG, "it is an option of fully_async")
_STEPS_OF_A_SYNC = _number(1, MOST_LAG, "it is an option of fully_async", whole=True)
_MINI_BATCHES = _number(1, float("inf"), "it is the mini-batches of one step", whole=True)
_DEVICES = _number(1, float("inf"), "correct it", whole=True)
_MEGABYTES = Takes(
    lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1,
    "a whole number of MB >= 1",
    "leave it out for the default",
)
_CLIP = Takes(lambda v: isinstance(v, int | float) and 0 < v < 1, "a number between 0 and 1", "correct it")
_SCORES = Takes(lambda v: isinstance(v, bool), "True or False", "True scores while generation runs")
_FINISHES = Takes(lambda v: isinstance(v, bool), "True or False", "False lets requests finish before a load")
_FIRST_AND_END = Takes(
    lambda v: isinstance(v, list | tuple) and len(v) == 2 and all(type(x) is int for x in v),
    "[first, end], two whole numbers",
    "correct it",
)
_VARIANT = Takes(
    lambda value: isinstance(value, str) and value in LOSS_OF_VARIANT,
    f"one of {', '.join(LOSS_OF_VARIANT)}",
    f"set verl's other losses by {_LOSS_MODE}",
)


def _strategy(value: Any, document: Document) -> Outcome:
    try:
        return Outcome("set", {"strategy": canonical_strategy(value, "")})
    except ConfigError as error:
        raise WrongValue(str(error).lstrip()) from None


def _generate_ahead(value: Any, document: Document) -> Outcome:
    _STEPS_AHEAD.check(value)
    return _lag_of(value - 1)


def _generation_ratio(value: Any, document: Document) -> Outcome:
    _BATCHES_AHEAD.check(value)
    return _lag_of(float(value))


def _staleness_threshold(value: Any, document: Document) -> Outcome:
    _THRESHOLD.check(value)
    return Outcome("set", {"staleness_threshold": value, "strategy": "fully_async"}, "strategy=fully_async")


def _steps_of_a_sync(value: Any, document: Document) -> Outcome:
    _STEPS_OF_A_SYNC.check(value)
    return Outcome("set", {"strategy": "fully_async", EVERY: value})


def _mini_batches(value: Any, document: Document) -> Outcome:
    _MINI_BATCHES.check(value)
    return Outcome("set", {"require_batches": value}, f"{_BATCH} of {value} x {_MINI_BATCH}")


def _pg_variant(value: Any, document: Document) -> Outcome:
    if not _VARIANT.holds(value):
        raise WrongValue(
            f"must be {_VARIANT.rule}, got {value!r}{hint(value, LOSS_OF_VARIANT)}; {_VARIANT.remedy}"
        )
    return Outcome("set", {"loss_mode": LOSS_OF_VARIANT[value]})


def _ratios(value: Any, document: Document) -> Outcome:
    pools = pools_of_ratios(value)
    return Outcome("set", {"pools": pools}, _describe_pools(pools))


def _window(value: Any, document: Document) -> Outcome:
    _FIRST_AND_END.check(value)
    return Outcome("set", {"diffusion.sde_window_first": value[0], "diffusion.sde_window_end": value[1]})


def _policy(value: bool) -> str:
    return "keep" if value else "drain"


def _same(knob: str) -> tuple[Any, tuple[str, ...], str]:
    return to(knob), (knob,), f"`{knob}`"


_STRATEGY_AND_LAG = ("strategy", LAG, SHARE)
_QUOTA_MEANING = (
    f"`strategy=fully_async`; `{LAG}` and `{SHARE}`: (1 + value) * k - 1, with k steps per weight update"
)
_NO_TRUE_CFG = "Stable Diffusion 3 and FLUX have guidance_scale; set that one"
_NO_NOISE = "images of a validation are drawn without noise"
_WINDOW = ("diffusion.sde_window_first", "diffusion.sde_window_end")
_WINDOW_MEANING = "`diffusion.sde_window_first` and `diffusion.sde_window_end`"
_CLIPS = tuple(f"actor_rollout_ref.actor.clip_ratio{end}" for end in ("", "_low", "_high"))
_CLIPS_MEANING = ", ".join(f"`{path}`" for path in _CLIPS)

FOREIGN: tuple[ForeignKey, ...] = (
    ForeignKey(
        "async_strategy",
        _strategy,
        ("strategy", LAG),
        "`strategy`; spellings such as `one-step-off` and `naive` are understood",
    ),
    ForeignKey("actor_rollout_ref.async_strategy", _strategy, ("strategy", LAG)),
    ForeignKey(
        "trainer.generate_ahead_steps",
        _generate_ahead,
        _STRATEGY_AND_LAG,
        f"`{LAG}`: the value minus 1, so that 2 is one-step-off",
    ),
    ForeignKey(
        "async_generation_ratio",
        _generation_ratio,
        _STRATEGY_AND_LAG,
        f"`{LAG}`: the value rounded up; `{SHARE}`: its fraction",
    ),
    ForeignKey(
        "actor_rollout_ref.rollout.enable_dual_buffer",
        required(True, "leave it out, or train with stock verl", "weights always use the dual buffer"),
        meaning="nothing: weights always use the dual buffer; False is an error",
    ),
    ForeignKey(
        "actor_rollout_ref.rollout.with_reward",
        to(WHILE_GENERATING, takes=_SCORES),
        (WHILE_GENERATING,),
        f"`{WHILE_GENERATING}`",
    ),
    ForeignKey(
        "actor_rollout_ref.rollout.param_update_preduce_bucket_size_mb",
        to("weight_sync.gather_bucket_size_mb", takes=_MEGABYTES),
        ("weight_sync.gather_bucket_size_mb",),
        "`weight_sync.gather_bucket_size_mb`",
    ),
    ForeignKey(
        "actor_rollout_ref.rollout.param_update_consume_bucket_size_mb",
        to("weight_sync.load_bucket_size_mb", takes=_MEGABYTES),
        ("weight_sync.load_bucket_size_mb",),
        "`weight_sync.load_bucket_size_mb`",
    ),
    ForeignKey("staleness_threshold", _staleness_threshold, _STRATEGY_AND_LAG, _QUOTA_MEANING),
    ForeignKey(
        "trigger_parameter_sync_step",
        _steps_of_a_sync,
        (*_STRATEGY_AND_LAG, EVERY),
        f"`strategy=fully_async`, `{EVERY}`, and `{LAG}` as above",
    ),
    ForeignKey("async_training.staleness_threshold", _staleness_threshold, _STRATEGY_AND_LAG),
    ForeignKey("async_training.trigger_parameter_sync_step", _steps_of_a_sync, (*_STRATEGY_AND_LAG, EVERY)),
    ForeignKey("require_batches", _mini_batches, meaning=f"`{_BATCH}`: that many times `{_MINI_BATCH}`"),
    ForeignKey("async_training.require_batches", _mini_batches),
    ForeignKey("pg_variant", _pg_variant, meaning=f"`{_LOSS_MODE}`; one of {', '.join(LOSS_OF_VARIANT)}"),
    ForeignKey("actor_rollout_ref.actor.pg_variant", _pg_variant),
    ForeignKey(
        "partial_rollout",
        to(IN_FLIGHT_POLICY, as_=_policy, takes=_FINISHES),
        (IN_FLIGHT_POLICY,),
        f"`{IN_FLIGHT_POLICY}`: keep, or drain if False",
    ),
    ForeignKey(
        "async_training.partial_rollout",
        to(IN_FLIGHT_POLICY, as_=_policy, takes=_FINISHES),
        (IN_FLIGHT_POLICY,),
    ),
    # RATIOS, TASKS and TASK_RATIOS of `placement`.
    ForeignKey(
        "trainer.use_nodes_ratios", _ratios, ("pools",), "`pools`; `[train, logp, ref_logp, generate]`"
    ),
    ForeignKey(
        "trainer.sperated_node_tasks",
        to("node_tasks", text="roles of pools"),
        ("pools",),
        "`pools`, with `trainer.sperated_node_ratios`",
    ),
    ForeignKey("trainer.sperated_node_ratios", to("node_ratios", text="shares of pools"), ("pools",)),
    # Images: GeRL's keys, which are flat, and verl-omni's, which are nested.
    ForeignKey("actor_rollout_ref.rollout.noise_level", *_same("diffusion.noise_level")),
    ForeignKey("actor_rollout_ref.rollout.sde_type", *_same("diffusion.sde_type")),
    ForeignKey("actor_rollout_ref.rollout.sde_window_size", *_same("diffusion.sde_window_size")),
    ForeignKey("actor_rollout_ref.rollout.algo.noise_level", *_same("diffusion.noise_level")),
    ForeignKey("actor_rollout_ref.rollout.algo.sde_type", *_same("diffusion.sde_type")),
    ForeignKey("actor_rollout_ref.rollout.algo.sde_window_size", *_same("diffusion.sde_window_size")),
    ForeignKey("actor_rollout_ref.rollout.num_inference_steps", *_same("diffusion.num_inference_steps")),
    ForeignKey("actor_rollout_ref.rollout.image_height", *_same("diffusion.height")),
    ForeignKey("actor_rollout_ref.rollout.image_width", *_same("diffusion.width")),
    ForeignKey(
        "actor_rollout_ref.rollout.pipeline.num_inference_steps", *_same("diffusion.num_inference_steps")
    ),
    ForeignKey("actor_rollout_ref.rollout.pipeline.height", *_same("diffusion.height")),
    ForeignKey("actor_rollout_ref.rollout.pipeline.width", *_same("diffusion.width")),
    ForeignKey(
        "actor_rollout_ref.rollout.pipeline.max_sequence_length", *_same("diffusion.max_sequence_length")
    ),
    ForeignKey(
        "actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps",
        *_same("diffusion.validation_steps"),
    ),
    ForeignKey("actor_rollout_ref.rollout.sde_window_range", _window, _WINDOW, _WINDOW_MEANING),
    ForeignKey("actor_rollout_ref.rollout.algo.sde_window_range", _window, _WINDOW, _WINDOW_MEANING),
    ForeignKey("actor_rollout_ref.rollout.guidance_scale", *_same("diffusion.guidance_scale")),
    ForeignKey("actor_rollout_ref.rollout.pipeline.guidance_scale", *_same("diffusion.guidance_scale")),
    ForeignKey(
        "actor_rollout_ref.rollout.pipeline.true_cfg_scale",
        required(1.0, _NO_TRUE_CFG),
        meaning="nothing: must be `1.0`",
    ),
    ForeignKey(
        "actor_rollout_ref.rollout.val_kwargs.algo.noise_level",
        required(0.0, _NO_NOISE),
        meaning="nothing: must be `0.0`",
    ),
    ForeignKey(
        "actor_rollout_ref.actor.diffusion_loss.loss_mode",
        required(FLOW_GRPO, f"set {_LOSS_MODE} to one of verl's"),
        meaning="nothing: must be `flow_grpo`",
        unique=False,
    ),
    ForeignKey(
        "actor_rollout_ref.actor.diffusion_loss.clip_ratio",
        to(*_CLIPS, takes=_CLIP),
        meaning=_CLIPS_MEANING,
        unique=False,
    ),
    ForeignKey(
        "actor_rollout_ref.actor.n_gpus_per_node",
        to("trainer.n_gpus_per_node", takes=_DEVICES),
        meaning="`trainer.n_gpus_per_node`",
        unique=False,
    ),
    ForeignKey(
        "data.reward_fn",
        left_out("set reward.custom_reward_function.path to a file with a function of images"),
        meaning="an error: set reward.custom_reward_function.path to a file with a function of images",
        unique=False,
    ),
    ForeignKey(
        "data.data_source",
        left_out("write it into each row of the data, as the column data_source"),
        meaning="an error: write it into each row of the data, as the column data_source",
        unique=False,
    ),
)
SET_BY_OTHERS: frozenset[str] = frozenset(path for key in FOREIGN for path in key.sets)
"""Knobs that our YAML leaves null, so that any other value there was written by the user."""
