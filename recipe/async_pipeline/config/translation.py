# SPDX-License-Identifier: Apache-2.0
"""Reads our keys out of a verl config once, checks where they stand, and translates those of other systems.

Pure: takes plain mappings, imports neither verl nor ray. Every complaint is one line: path, rule, value,
remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from ..redaction import shown
from .aliases import FOREIGN, Draft, groups_of_roles, quota, verls_own
from .paths import hint, select, walk
from .placement import wishes_of
from .rollout_correction import PARAMETERS, POLICY_LOSS
from .schema import (
    DEFAULT_AHEAD,
    DEFAULT_STRATEGY,
    OWN,
    STRATEGY_LAG,
    AsyncPipelineConfig,
    canonical_strategy,
    own_fields,
    plain_defaults,
)

ASYNC_TRAINING = "async_training"

HIGHER = ("", "trainer.", "trainer.v1.", "trainer.async_pipeline.")
BESIDE = (
    "actor_rollout_ref.",
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "algorithm.",
    "data.",
    "reward.",
)
"""Where a knob may have been put by mistake; `strategy` is a key of verl's actor."""
SWITCHES = ("async_pipeline", "actor_rollout_ref.async_pipeline")


@dataclass(frozen=True)
class Translation:
    """The resolved config and one line for each key of another system that shaped it."""

    config: AsyncPipelineConfig
    notes: tuple[str, ...]
    verl: Mapping[str, Any] = field(default_factory=dict)
    """What keys of verl's own get, by their paths."""


def is_enabled(raw: Mapping[str, Any]) -> bool:
    """Does this config ask for the pipeline? Raises ConfigError: the switch is not a boolean, or they
    disagree.
    """
    found = {path: value for path in SWITCHES if (value := select(raw, path)) is not None}
    for path, value in found.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{path} must be True or False, got {value!r}; the knobs live under {OWN}")
    if len(set(found.values())) > 1:
        raise ConfigError(f"{' and '.join(found)} disagree; keep one of them")
    return any(found.values())


def require_no_stray_keys(raw: Mapping[str, Any]) -> None:
    """Check a config without the switch: defaults of ours may be composed in, but a choice is an error.

    Raises ConfigError: the run would ignore a key that the user has set.
    """
    reject_near_misses(raw)
    # The shipped defaults leave these two to the strategy.
    defaults = plain_defaults() | {"strategy": None, "max_lag": None}
    own = select(raw, OWN)
    knobs = [
        (f"{OWN}.{name}", value, defaults.get(str(name)))
        for name, value in (own.items() if isinstance(own, Mapping) else ())
    ]
    ours = [(path, select(raw, path), None) for key in FOREIGN for path in key.paths] + knobs
    stray = [path for path, value, default in ours if value is not None and value != default and value != []]
    if stray:
        raise ConfigError(f"{stray[0]} is set but the pipeline is not asked for; add +async_pipeline=True")


def resolve(raw: Mapping[str, Any]) -> Translation:
    """The pipeline's config out of a whole verl config. Raises ConfigError."""
    _reject_misplaced(raw)
    own = _own_section(raw)
    _reject_unknown(own)
    draft = Draft()
    notes: list[str] = []
    for name in ("strategy", "max_lag"):
        if own.get(name) is not None:
            value = (
                canonical_strategy(own.pop(name), f"{OWN}.strategy") if name == "strategy" else own.pop(name)
            )
            draft.propose(name, value, f"{OWN}.{name}")
        else:
            own.pop(name, None)
    for key in FOREIGN:
        for path in key.paths:
            value = select(raw, path)
            if value is not None:
                notes.append(f"{path}={value} -> {key.apply(value, draft)}")
    notes += [*quota(draft, own.get("sync_every")), *groups_of_roles(draft)]
    _adopt(own, draft)
    own["strategy"], own["max_lag"] = _strategy_and_lag(draft)
    own = {k: v for k, v in own.items() if v is not None}
    _check_types(own)
    if "pools" in own:
        wishes_of(own["pools"])
    verl = verls_own(raw, own, draft)
    notes += [f"{path} becomes {value}" for path, value in verl.items() if select(raw, path) != value]
    try:
        return Translation(AsyncPipelineConfig.of(own), tuple(notes), verl)
    except ConfigError as error:
        said = [
            f"{name} is of {source}"
            for name, source in draft.sources.items()
            if name in own_fields() and not source.startswith(OWN)
        ]
        raise ConfigError(f"{error} ({', '.join(said)})" if said else str(error)) from None


def _adopt(own: dict[str, Any], draft: Draft) -> None:
    """Take over what keys of other systems say. Raises ConfigError: our own key says something else.

    Our own file leaves these knobs null, so that what stands there is what the user wrote.
    """
    for name, value in draft.values.items():
        if name in own_fields() and name not in ("strategy", "max_lag"):
            if own.get(name) not in (None, value):
                raise ConfigError(
                    f"{draft.sources[name]} asks for {name}={value} but {OWN}.{name} for {own[name]}; keep "
                    "one of them"
                )
            own[name] = value


def _own_section(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what stands under `trainer.v1.async_pipeline`. Raises ConfigError: it is not a section."""
    own = select(raw, OWN)
    if own is not None and not isinstance(own, Mapping):
        raise ConfigError(
            f"{OWN} must be a section of knobs, got {own!r}; the switch is +async_pipeline=True"
        )
    return dict(own or {})


def _strategy_and_lag(draft: Draft) -> tuple[str, int]:
    strategy, lag = draft.values.get("strategy"), draft.values.get("max_lag")
    if lag is not None and (isinstance(lag, bool) or not isinstance(lag, int)):
        share = f"; {OWN}.oldest_share lets a part of each batch be older" if isinstance(lag, float) else ""
        raise ConfigError(
            f"{draft.sources['max_lag']} must be a whole number, got {lag!r}; use 0 for on-policy{share}"
        )
    if strategy is None:
        whole = draft.values.get("oldest_share", 1) == 1
        by_lag = {0: "on_policy", 1: "one_step_off"} if whole else {}
        strategy = DEFAULT_STRATEGY if lag is None else by_lag.get(lag, "n_step_ahead")
    implied = STRATEGY_LAG.get(strategy)
    if implied is not None and lag is not None and implied != lag:
        raise ConfigError(
            f"{draft.sources['strategy']}={strategy} means max_lag {implied} but "
            f"{draft.sources['max_lag']} asks for "
            f"{lag}; use n_step_ahead for another lag or drop one of the two"
        )
    if lag is None:
        lag = DEFAULT_AHEAD if implied is None else implied
    return strategy, lag


def _reject_unknown(own: Mapping[str, Any]) -> None:
    for name in own:
        if name not in own_fields():
            raise ConfigError(
                f"{OWN}.{name} is unknown, got "
                f"{shown(str(name), own[name])}{hint(name, own_fields()) or _all_knobs()}"
            )


def unknown_key(path: str) -> str:
    """What to say of a path that hydra finds in no config: one line, with the nearest of our knobs."""
    parent, _, name = path.rpartition(".")
    if parent == OWN:
        if name in own_fields():
            return f"{path} is a knob that this config does not have; write +{path}=... to add it"
        return f"{path} is unknown{hint(name, own_fields()) or _all_knobs()}"
    return f"{path} is not a key of this config; check its spelling, or write +{path}=... to add it"


def _all_knobs() -> str:
    return f"; knobs: {', '.join(own_fields())}"


def _reject_misplaced(raw: Mapping[str, Any]) -> None:
    """Our names anywhere but in their place would be ignored by verl, so they are errors."""
    right_places: dict[str, tuple[str, ...]] = {}
    for key in FOREIGN:
        for path in key.paths:
            leaf = path.rsplit(".", 1)[-1]
            right_places[leaf] = (*right_places.get(leaf, ()), path)
    right_places["async_pipeline"] = (*SWITCHES, OWN)
    unique = (
        "max_lag",
        "oldest_share",
        "sync_every",
        "proof_tensors",
        "step_down_after",
        "step_up_after",
        "in_flight",
        "publish_timeout_s",
        "wait_timeout_s",
        "loop_stall_s",
        "custom_roles",
        "reuse_prefixes",
        "loads_at_once",
        "old_logp",
        "ref_refresh_every",
        "reward_timeout_s",
        "reward_failure",
        "reward_while_generating",
        "bad_data",
        "prompt_attempts",
    )
    right_places.update({name: (f"{OWN}.{name}",) for name in unique})
    right_places.update({name: (f"{POLICY_LOSS}.{name}",) for name in PARAMETERS})
    for path, value in walk(raw):
        leaf = path.rsplit(".", 1)[-1]
        places = right_places.get(leaf, ())
        if places and path not in places:
            raise ConfigError(
                f"{path} is misplaced, got {shown(path, value)}; it belongs at {' or '.join(places)}"
            )
    # The other names are common; only where verl has no such key are they certainly meant for us.
    for name in (knob.name for knob in dataclasses.fields(AsyncPipelineConfig) if knob.name not in unique):
        for path in (
            *(f"{parent}{name}" for parent in HIGHER),
            *(f"{parent}{name}" for parent in BESIDE if name != "strategy"),
        ):
            if select(raw, path) is not None and path not in right_places.get(name, ()):
                raise ConfigError(
                    f"{path} is misplaced, got {shown(path, select(raw, path))}; it belongs at {OWN}.{name}"
                )
    reject_near_misses(raw)
    _check_async_training(raw)


def _check_async_training(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError: the section of verl's fully asynchronous trainer has what this one does not
    understand.
    """
    theirs = select(raw, ASYNC_TRAINING)
    if theirs is None:
        return
    known = [
        path.partition(".")[2]
        for key in FOREIGN
        for path in key.paths
        if path.startswith(f"{ASYNC_TRAINING}.")
    ]
    if not isinstance(theirs, Mapping):
        raise ConfigError(
            f"{ASYNC_TRAINING} must be a section with some of {', '.join(known)}, got {theirs!r}; correct it"
        )
    for name, value in theirs.items():
        if name not in known:
            raise ConfigError(
                f"{ASYNC_TRAINING}.{name} is unknown, got {value!r}; understood are {', '.join(known)}: "
                "correct it, or leave it out"
            )


def reject_near_misses(raw: Mapping[str, Any]) -> None:
    """A key that verl does not know and that is almost one of ours would be ignored, so it is an error.

    Looks at the levels on which our switches stand. Raises ConfigError.
    """
    ours = {path.rpartition(".")[2] for key in FOREIGN for path in key.paths} | {"async_pipeline"}
    for parent in (
        "",
        "actor_rollout_ref",
        "actor_rollout_ref.actor",
        "trainer",
        "actor_rollout_ref.rollout",
    ):
        node = select(raw, parent) if parent else raw
        for name in node if isinstance(node, Mapping) else ():
            if not isinstance(name, str) or name in ours:
                continue
            close = difflib.get_close_matches(name, list(ours), n=1, cutoff=0.85)
            if close:
                path = f"{parent}.{name}" if parent else name
                raise ConfigError(
                    f"{path} is unknown, got {shown(path, node[name])}; did you mean {close[0]!r}?"
                )


def _check_types(own: Mapping[str, Any]) -> None:
    kinds: Mapping[str, type | tuple[type, ...]] = {
        "wait_timeout_s": (int, float),
        "loop_stall_s": (int, float),
        "reward_timeout_s": (int, float),
        "reward_default": (int, float),
        "reward_attempts": int,
        "prompt_attempts": int,
        "reward_concurrency": int,
        "reward_batch": int,
        "reward_memory_mb": int,
        "reward_cpu_s": (int, float),
        "reward_failure": str,
        "validation": str,
        "publish_timeout_s": (int, float),
        "proof_tensors": int,
        "step_down_after": int,
        "step_up_after": int,
        "preduce_bucket_size_mb": int,
        "consume_bucket_size_mb": int,
        "sync_every": int,
        "loads_at_once": int,
        "ref_refresh_every": int,
        "old_logp": str,
        "depth": int,
        "oldest_share": (int, float),
        "in_flight": str,
        "stage": str,
        "stale": str,
        "run_dir": str,
    }
    for name, kind in kinds.items():
        value = own.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            wanted = "text" if kind is str else "a number" if isinstance(kind, tuple) else "a whole number"
            raise ConfigError(f"{OWN}.{name} must be {wanted}, got {value!r}; leave it out for the default")
    for name in ("reuse_prefixes", "single_mini_batch", "reward_while_generating"):
        if not isinstance(own.get(name, False), bool):
            raise ConfigError(
                f"{OWN}.{name} must be True or False, got {own[name]!r}; leave it out for the default"
            )
    roles = own.get("custom_roles", ())
    if not isinstance(roles, list | tuple) or not all(isinstance(spec, str) for spec in roles):
        raise ConfigError(
            f"{OWN}.custom_roles must be a list of texts, got {roles!r}; e.g. [module:Class@after->before]"
        )
