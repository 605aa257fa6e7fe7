# SPDX-License-Identifier: Apache-2.0
"""Check the parameters of a run's loss and of its correction for age, and describe both.

Pure: takes plain mappings, imports neither verl nor torch. docs/strategies.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from ...errors import ConfigError
from ..paths import OWN, hint, nested, select
from .refusals import (
    Refusal,
    Settings,
    any_of,
    check_all,
    must_be_on,
    must_be_one_of,
    number_above,
    other_than,
    refuse,
)

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
CORRECTION = "algorithm.rollout_correction"
ESTIMATOR = "algorithm.adv_estimator"
FLOW, PROCESS = "flow_grpo", "grpo_process"
"""Estimators of this package, see `trainer.batches.advantages`."""
UNUSABLE = ("remax", "optimal_token_baseline", "tir_optimal_token_baseline")
"""Estimators of verl that need more than its V1 trainer computes."""
SPLITS = ("advantage", "score")
RATIO_LEVELS = ("token", "sequence")
IS_LEVELS = ("token", "sequence")
RS_OPTIONS = (
    *(f"{level}_k{k}" for level in ("token", "seq_sum", "seq_mean") for k in (1, 2, 3)),
    "seq_max_k2",
    "seq_max_k3",
)
"""Criteria by which verl masks; a run may have several."""
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
"""verl's aggregations of token losses."""
PARAMETERS = (
    "tis_lower_bound",
    "tis_upper_bound",
    "topr_positive_weight",
    "topr_negative_weight",
    "topr_split",
    "topr_ratio_level",
)
"""Parameters of our losses; verl has no keys with these names."""
CORRECTION_KEYS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
    "bypass_mode",
    "loss_type",
)
_ACTOR = "actor_rollout_ref.actor"
WITHOUT_RATIO = ("policy_gradient", "gpg")
"""Losses without a ratio to the old policy."""
PI_OLD = {
    "update": "version s-1",
    "trainer": "version s-1",
    "logp_pool": "version s-2",
    "rollout": "the versions that generated the tokens",
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _weight(value: Any) -> bool:
    return _is_number(value) and 0 <= value < math.inf


def _switch(value: Any) -> bool:
    return isinstance(value or False, bool)


def _is_criteria(value: Any) -> bool:
    """Return whether verl can mask by a value: criteria with commas between them, or none at all."""
    chosen = [one.strip() for one in value.split(",")] if isinstance(value, str) else []
    return value is None or (any(chosen) and {*filter(None, chosen)} <= {*RS_OPTIONS})


def _clip(name: str, least: float) -> Refusal:
    rule = f"must be a number > {least:g}"
    return Refusal(f"{_ACTOR}.{name}", number_above(least), rule, "leave it out for verl's default")


PARAMETER_ROWS: tuple[Refusal, ...] = (
    Refusal(f"{POLICY_LOSS}.tis_lower_bound", _is_number, "must be a number", "the default is 0"),
    Refusal(f"{POLICY_LOSS}.tis_upper_bound", _is_number, "must be a number", "the default is 1"),
    Refusal(
        f"{POLICY_LOSS}.topr_positive_weight", _weight, "must be a number >= 0 and finite", "the default is 1"
    ),
    Refusal(
        f"{POLICY_LOSS}.topr_negative_weight", _weight, "must be a number >= 0 and finite", "the default is 1"
    ),
    must_be_one_of(f"{POLICY_LOSS}.topr_split", SPLITS, "advantage is the default"),
    must_be_one_of(f"{POLICY_LOSS}.topr_ratio_level", RATIO_LEVELS, "token is the default"),
)
"""Rows for the parameters that are set."""
CORRECTING_LOSS = "bypass_mode"
"""verl's loss that applies `rollout_is` and `rollout_rs` between the current policy and the rollout."""


def _bypassed(at: Settings) -> bool:
    return at[f"{CORRECTION}.bypass_mode"] is True


def _corrects_in_the_loss(at: Settings) -> bool:
    return _bypassed(at) and at[f"{POLICY_LOSS}.loss_mode"] == CORRECTING_LOSS


def _bypassed_without_correction(at: Settings) -> bool:
    return _bypassed(at) and not _corrects_in_the_loss(at)


BEFORE_NAMES: tuple[Refusal, ...] = (
    Refusal(
        f"{POLICY_LOSS}.loss_mode",
        other_than(CORRECTING_LOSS),
        "must not be bypass_mode, which reads the rollout correction",
        f"set {CORRECTION}.bypass_mode=True",
        when=lambda at: not _bypassed(at),
    ),
)
LOSS_ROWS: tuple[Refusal, ...] = (
    Refusal(
        f"{POLICY_LOSS}.dro_beta",
        lambda value: value is not None and number_above(0)(value),
        "must be a number > 0 with loss_mode dro (kimi15)",
        "ROLL uses 0.1",
        when=lambda at: at[f"{POLICY_LOSS}.loss_mode"] == "dro",
    ),
    _clip("clip_ratio", 0),
    _clip("clip_ratio_low", 0),
    _clip("clip_ratio_high", 0),
    _clip("clip_ratio_c", 1),
    Refusal(
        f"{_ACTOR}.loss_agg_mode",
        any_of(None, *AGGREGATIONS),
        f"must be one of {', '.join(AGGREGATIONS)}",
        "token-mean is verl's default",
    ),
)
CORRECTION_ROWS: tuple[Refusal, ...] = (
    Refusal(f"{CORRECTION}.bypass_mode", _switch, "must be True or False", "False is verl's default"),
    Refusal(
        f"{CORRECTION}.rollout_is_batch_normalize",
        _switch,
        "must be True or False",
        "False is verl's default",
    ),
    Refusal(
        f"{CORRECTION}.loss_type",
        any_of(None, "ppo_clip"),
        f"must be ppo_clip without {CORRECTION}.bypass_mode",
        "set pg_variant instead",
        when=lambda at: not _corrects_in_the_loss(at),
    ),
    Refusal(
        f"{CORRECTION}.loss_type",
        any_of(None, "ppo_clip", "reinforce"),
        "must be ppo_clip or reinforce",
        "ppo_clip is verl's default",
    ),
    Refusal(
        f"{CORRECTION}.rollout_is",
        any_of(None, *IS_LEVELS),
        f"must be one of {', '.join(IS_LEVELS)} or null",
        "token is a usual choice",
    ),
    Refusal(
        f"{CORRECTION}.rollout_rs",
        _is_criteria,
        f"must be of {', '.join(RS_OPTIONS)}, with commas between them, or null",
        "token_k1 masks single tokens",
    ),
)


_ROLLOUT_LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"
_OF_THE_ROLLOUT = "if old log-probs are the rollout's"
_ONLY_THE_LOSS = f"set it to null, or {POLICY_LOSS}.loss_mode=vanilla, with which it is a part of the loss"


LEFT_OUT: tuple[Refusal, ...] = (
    *CORRECTION_ROWS,
    Refusal(
        f"{CORRECTION}.rollout_rs_threshold",
        other_than(None),
        "must be given with rollout_rs",
        "set it to what is kept, such as '\"0.5_2.0\"' for token_k1, or rollout_rs=null",
        lambda at: at[f"{CORRECTION}.rollout_rs"] is not None,
    ),
    must_be_on(_ROLLOUT_LOG_PROBS, "set it", _OF_THE_ROLLOUT, _bypassed),
    must_be_on(
        _ROLLOUT_LOG_PROBS,
        "set it",
        f"with {CORRECTION}.rollout_is",
        lambda at: at[f"{CORRECTION}.rollout_is"] is not None,
    ),
    must_be_on(
        _ROLLOUT_LOG_PROBS,
        "set it",
        f"with {CORRECTION}.rollout_rs",
        lambda at: at[f"{CORRECTION}.rollout_rs"] is not None,
    ),
    must_be_on(
        _ROLLOUT_LOG_PROBS,
        "set it",
        f"with {OWN}.staleness.ess_floor",
        lambda at: at[f"{OWN}.staleness.ess_floor"] is not None,
    ),
    Refusal(
        f"{OWN}.staleness.ess_floor",
        any_of(None),
        f"must be null {_OF_THE_ROLLOUT}, since all weights are 1 then",
        "leave it out",
        _bypassed,
    ),
    Refusal(
        f"{CORRECTION}.rollout_is",
        any_of(None),
        f"must be null {_OF_THE_ROLLOUT} (bypass_mode, old_logp=rollout)",
        _ONLY_THE_LOSS,
        _bypassed_without_correction,
    ),
    Refusal(
        f"{CORRECTION}.rollout_rs",
        any_of(None),
        f"must be null {_OF_THE_ROLLOUT} (bypass_mode, old_logp=rollout)",
        _ONLY_THE_LOSS,
        _bypassed_without_correction,
    ),
)
"""Corrections that verl would silently leave out, after wrong values: those would be refused next."""


def check_loss_parameters(section: Mapping[str, Any]) -> None:
    """Check the parameters of `tis` and `topr` that are set. Raises ConfigError for a wrong type or range."""
    at = Settings(nested({POLICY_LOSS: section}))
    present = [row for row in PARAMETER_ROWS if row.path.rpartition(".")[2] in section]
    refuse(present, at)
    bounds = [section.get("tis_lower_bound", 0.0), section.get("tis_upper_bound", 1.0)]
    if not 0 <= bounds[0] <= bounds[1] < math.inf:
        raise ConfigError(
            f"{POLICY_LOSS}.tis_lower_bound and tis_upper_bound must be 0 <= lower <= upper, finite, "
            f"got {bounds[0]} and {bounds[1]}; the defaults are 0 and 1"
        )


def check_estimator(config: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises ConfigError unless `known`, verl's registry, has the estimator of advantages."""
    name, usable = select(config, ESTIMATOR), sorted({*known} - {*UNUSABLE})
    if name not in known:
        raise ConfigError(
            f"{ESTIMATOR} must be one of {', '.join(usable)}, got {name!r}{hint(str(name), usable)}; "
            "correct it"
        )


def check_loss(config: Mapping[str, Any], known: Collection[str] | None) -> None:
    """Raises ConfigError for an unknown loss, or a parameter that a worker would refuse minutes later.

    `config` is verl's, resolved. `known` holds all losses, or is None if other code may add some.
    """
    section = select(config, POLICY_LOSS) or {}
    check_loss_parameters(section)
    mode = section.get("loss_mode")
    at = Settings(config)
    refuse(BEFORE_NAMES, at)

    def check_mode() -> None:
        if known is not None and mode not in known:
            usable = sorted({*known} - (set() if _bypassed(at) else {CORRECTING_LOSS}))
            raise ConfigError(
                f"{POLICY_LOSS}.loss_mode must be one of {', '.join(usable)}, got "
                f"{mode!r}{hint(str(mode), usable)}; correct it"
            )

    check_all(
        check_mode,
        partial(refuse, LOSS_ROWS, at),
        partial(_require_known_keys, select(config, CORRECTION) or {}),
    )


def _require_known_keys(section: Mapping[str, Any]) -> None:
    for name, value in section.items():
        if name not in CORRECTION_KEYS and name != "_target_":
            raise ConfigError(
                f"{CORRECTION}.{name} is unknown, got {value!r}{hint(str(name), CORRECTION_KEYS)}; verl's "
                f"keys are {', '.join(CORRECTION_KEYS)}"
            )


def correcting_loss(config: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return keys with which the loss applies the corrections of a config with `bypass_mode`, each with why.

    verl's V1 trainer would ignore `rollout_is`, `rollout_rs` and `loss_type` then. Its older one handed the
    section to this loss.
    """
    section = select(config, CORRECTION)
    if not isinstance(section, Mapping) or section.get("bypass_mode") is not True:
        return {}
    mode = select(config, f"{POLICY_LOSS}.loss_mode")
    chosen = section.get("rollout_is") or section.get("rollout_rs") or section.get("loss_type") == "reinforce"
    if mode != CORRECTING_LOSS and not (chosen and mode in (None, "vanilla")):
        return {}
    why = f"with {CORRECTION}.bypass_mode, the loss applies the corrections"
    return {
        f"{POLICY_LOSS}.loss_mode": (CORRECTING_LOSS, why),
        f"{POLICY_LOSS}.rollout_correction": (dict(section), why),
    }


def describe_correction(config: Mapping[str, Any], old_logp: str, max_lag: int) -> str:
    """Describe how gradients of older responses are corrected; starts with `none` if they are not."""
    section = select(config, CORRECTION) or {}
    if old_logp == "rollout":
        if select(config, f"{POLICY_LOSS}.loss_mode") in WITHOUT_RATIO:
            return f"none: the loss has no ratio{_remedy(max_lag, 'pg_variant=tis')}"
        by_loss = "by the loss, whose ratio is to the versions that generated the tokens"
        if select(config, f"{POLICY_LOSS}.loss_mode") != CORRECTING_LOSS:
            return by_loss
        return "; ".join([f"{by_loss} ({section.get('loss_type') or 'ppo_clip'})", *_masks(section)])

    found = []
    if section.get("rollout_is"):
        limits = str(section.get("rollout_is_threshold")).partition("_")
        bound = f"at most {limits[0]}" if not limits[1] else f"0 outside {limits[0]} to {limits[2]}"
        what = "token" if section["rollout_is"] == "token" else "response"
        scaled = ", then scaled to a mean of 1" if section.get("rollout_is_batch_normalize") else ""
        found.append(
            f"weight of a {what}: ratio of {PI_OLD[old_logp]} to the versions that generated it, "
            f"{bound}{scaled}"
        )
    found += _masks(section)
    return "; ".join(found) or f"none{_remedy(max_lag, f'{CORRECTION}.rollout_is=token')}"


def _masks(section: Mapping[str, Any]) -> list[str]:
    """Describe the rejection of tokens or responses, if there is any."""
    by = section.get("rollout_rs")
    return [f"mask by {by} beyond {section.get('rollout_rs_threshold')}"] if by else []


def _remedy(max_lag: int, remedy: str) -> str:
    return f", though responses may have lag {max_lag}; set {remedy} to correct for it" if max_lag else ""
