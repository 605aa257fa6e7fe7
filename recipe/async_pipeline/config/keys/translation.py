# SPDX-License-Identifier: Apache-2.0
"""Read our keys from a verl config, and translate the keys of other systems.

Pure: takes plain mappings, imports neither verl nor ray. Error messages have one line: path, rule, value,
remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError
from ..knobs.fields import flattened, knobs_of
from ..knobs.schema import (
    DEFAULT_AHEAD,
    DEFAULT_STRATEGY,
    STRATEGY_LAG,
    AsyncPipelineConfig,
    canonical_strategy,
    knob_paths,
    plain,
)
from ..paths import MODE, OWN, PATCH_FREE, RUNTIME, select
from ..placement import wishes_of
from .aliases import EVERY, FOREIGN, LAG, SET_BY_OTHERS, SHARE, groups_of_roles, quota, verls_own
from .foreign_keys import Draft
from .misplaced import SWITCHES, reject_misplaced, reject_near_misses
from .older_verl import corrected


@dataclass(frozen=True)
class Translation:
    """The user's knobs, and how keys of other systems shaped them."""

    config: AsyncPipelineConfig
    notes: tuple[str, ...]
    """One line for each key of another system."""
    verl: Mapping[str, Any] = field(default_factory=dict)
    """Values of verl's own keys, by their paths."""


def is_enabled(raw: Mapping[str, Any]) -> bool:
    """Return whether this config switches the pipeline on.

    Raises ConfigError if the switch is not a boolean, or if its spellings disagree.
    """
    found = {path: value for path in SWITCHES if (value := select(raw, path)) is not None}
    for path, value in found.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{path} must be True or False, got {value!r}; the knobs live under {OWN}")
    if len(set(found.values())) > 1:
        raise ConfigError(f"{' and '.join(found)} disagree; keep one of them")
    patch_free = select(raw, MODE) == PATCH_FREE
    if patch_free and False in found.values():
        raise ConfigError(f"{next(iter(found))}=False and {MODE}={PATCH_FREE} disagree; keep one of them")
    return patch_free or any(found.values())


def require_no_stray_keys(raw: Mapping[str, Any]) -> None:
    """Check a config without the switch. Our defaults may be composed in, but no other values.

    Raises ConfigError if the run would ignore a key that the user has set.
    """
    reject_near_misses(raw)
    # The shipped defaults leave these two to the strategy.
    defaults = flattened(AsyncPipelineConfig, plain(AsyncPipelineConfig())) | {"strategy": None, LAG: None}
    own = select(raw, OWN)
    knobs = flattened(AsyncPipelineConfig, own) if isinstance(own, Mapping) else {}
    ours = [(key.path, select(raw, key.path), None) for key in FOREIGN]
    ours += [(RUNTIME, select(raw, RUNTIME), None)]
    ours += [(f"{OWN}.{path}", value, defaults[path]) for path, value in knobs.items()]

    stray = [path for path, value, default in ours if value is not None and value != default]
    if stray:
        raise ConfigError(f"{stray[0]} is set but the pipeline is not asked for; add +async_pipeline=True")


def resolve(raw: Mapping[str, Any]) -> Translation:
    """Read the knobs from a whole verl config. Raises ConfigError if a key is wrong."""
    reject_misplaced(raw)
    own = {path: value for path, value in _own_section(raw).items() if value is not None}
    draft, notes = _proposed(raw, own)
    _adopt(own, draft)
    own["strategy"], own[LAG] = _strategy_and_lag(draft)
    if "pools" in own:
        wishes_of(own["pools"])

    verl = verls_own(raw, own, draft)
    notes += [f"{path} is set to {value}" for path, value in verl.items() if select(raw, path) != value]
    for path, (value, why) in corrected(raw).items():
        verl[path] = value
        notes.append(f"{path} is set to {value}: {why}")
    try:
        return Translation(AsyncPipelineConfig.of(own), tuple(notes), verl)
    except ConfigError as error:
        # The user may have written none of the knobs that the message names.
        origins = [
            f"{name} is set by {source}"
            for name, source in draft.sources.items()
            if name in knob_paths() and not source.startswith(OWN)
        ]
        raise ConfigError(f"{error} ({', '.join(origins)})" if origins else str(error)) from None


def _own_section(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's knobs by path. Raises ConfigError for an unknown knob, for null where a knob has a
    default that is something else, or if this is not a section.
    """
    own = select(raw, OWN)
    if own is not None and not isinstance(own, Mapping):
        raise ConfigError(
            f"{OWN} must be a section of knobs, got {own!r}; the switch is +async_pipeline=True"
        )
    found = flattened(AsyncPipelineConfig, own or {})
    for knob in knobs_of(AsyncPipelineConfig):
        # In the shipped defaults, null stands for what a key of another system may set.
        is_default = knob.default is None or knob.path in SET_BY_OTHERS
        if not is_default and found.get(knob.path, 0) is None:
            knob.check(None, f"{OWN}.{knob.path}")
    return found


def _proposed(raw: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Draft, list[str]]:
    """Collect what our strategy and lag and all keys of other systems propose, with a note on each of these.

    Raises ConfigError if two keys disagree or a value is not supported.
    """
    draft, notes = Draft(), list[str]()
    if "strategy" in own:
        path = f"{OWN}.strategy"
        draft.propose("strategy", canonical_strategy(own["strategy"], path), path)
    if LAG in own:
        draft.propose(LAG, own[LAG], f"{OWN}.{LAG}")
    for key in FOREIGN:
        value = select(raw, key.path)
        if value is not None:
            outcome = key.apply(value, raw)
            for name, wanted in outcome.overrides.items():
                draft.propose(name, wanted, key.path)
            notes.append(f"{key.path}={value} -> {outcome.describe()}")
    notes += [*quota(draft, own.get(EVERY)), *groups_of_roles(draft)]
    return draft, notes


def _adopt(own: dict[str, Any], draft: Draft) -> None:
    """Set the knobs that keys of other systems propose. Raises ConfigError if the user's knob differs.

    Our YAML leaves these knobs null, so any value found there was written by the user.
    """
    for name, value in draft.values.items():
        if name in knob_paths() and name not in ("strategy", LAG):
            if own.get(name) not in (None, value):
                raise ConfigError(
                    f"{draft.sources[name]} asks for {name}={value} but {OWN}.{name} for {own[name]}; keep "
                    "one of them"
                )
            own[name] = value


def _strategy_and_lag(draft: Draft) -> tuple[str, int]:
    strategy, lag = draft.values.get("strategy"), draft.values.get(LAG)
    if lag is not None and (isinstance(lag, bool) or not isinstance(lag, int)):
        share = f"; {OWN}.{SHARE} lets a part of each batch be older" if isinstance(lag, float) else ""
        raise ConfigError(
            f"{draft.sources[LAG]} must be a whole number, got {lag!r}; use 0 for on-policy{share}"
        )

    if strategy is None:
        whole = draft.values.get(SHARE, 1) == 1
        by_lag = {0: "on_policy", 1: "one_step_off"} if whole else {}
        strategy = DEFAULT_STRATEGY if lag is None else by_lag.get(lag, "n_step_ahead")

    implied = STRATEGY_LAG.get(strategy)
    if implied is not None and lag is not None and implied != lag:
        raise ConfigError(
            f"{draft.sources['strategy']}={strategy} means max_lag {implied} but "
            f"{draft.sources[LAG]} asks for {lag}; use n_step_ahead for another lag or drop one of the two"
        )

    if lag is None:
        lag = DEFAULT_AHEAD if implied is None else implied
    return strategy, lag
