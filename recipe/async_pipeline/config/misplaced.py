# SPDX-License-Identifier: Apache-2.0
"""Refuse keys that verl would ignore although they are meant for us: misplaced or misspelled ones."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..redaction import shown
from .aliases import FOREIGN
from .fields import sections_of
from .names import mapping_knobs, unknown
from .paths import OWN, RUNTIME, select, walk
from .rollout_correction import PARAMETERS, POLICY_LOSS
from .schema import AsyncPipelineConfig, knob_paths

SWITCHES = ("async_pipeline", "actor_rollout_ref.async_pipeline")
ASYNC_TRAINING = "async_training"
COMMON = frozenset(
    {"strategy", "run_dir", "pools", "validation", "depth", "every", "timeout_s", "failure", "default"}
    | {"environment", "max_turns", "isolation", "agent", "verify"}
    | {"attempts", "concurrency", "batch", "memory_mb", "cpu_s"}
)
"""Names of knobs that other software also uses. The search for them is limited to `HIGHER`
and `LIKELY`; all other names are searched for in the whole config.
"""
HIGHER = ("", "trainer.", "trainer.v1.", "trainer.async_pipeline.")
LIKELY = (
    "actor_rollout_ref.",
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "algorithm.",
    "data.",
    "reward.",
)
"""Places where a user may put a knob by mistake."""
ALSO_VERLS = ("strategy", "agent")
"""Knobs whose names are also keys of verl's below `LIKELY`: of its actor, and of its rollout."""


FILES_OF = {"rllm": "rllm"} | dict.fromkeys(
    (
        "actor_infer",
        "actor_train",
        "custom_envs",
        "env_monitor",
        "is_num_return_sequences_expand",
        "num_return_sequences_in_group",
        "rollout_batch_size",
        "train_env_manager",
        "val_env_manager",
    ),
    "roll",
)
"""Keys at the top of other systems' files that no other software has, and their names in `translate`."""
VERLS_SECTIONS = {"rollout": "actor_rollout_ref.rollout"}
"""Sections of this package whose names verl uses too, and verl's places of them."""


def reject_misplaced(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError if a key of this package is misspelled, or is where no code reads it."""
    if select(raw, RUNTIME) is not None:
        raise ConfigError(f"{RUNTIME} is written when a run is launched; remove it, knobs belong below {OWN}")
    for name in FILES_OF.keys() & raw.keys():
        raise ConfigError(
            f"{name} is a key of another system's file, got {shown(name, raw[name])}; translate the file by "
            f"`async-pipeline translate {FILES_OF[name]} FILE`"
        )
    places = _places()
    for path, value in walk(raw):
        leaf = path.rpartition(".")[2]
        if leaf in places and path not in places[leaf] and not _is_left_to_names(path):
            raise ConfigError(
                f"{path} is misplaced, got {shown(path, value)}; it belongs at {' or '.join(places[leaf])}"
            )
    _reject_common(raw)
    reject_near_misses(raw)
    _check_async_training(raw)


def _is_left_to_names(path: str) -> bool:
    """Return whether `names` reports this path, which is in an unknown section."""
    if not path.startswith(f"{OWN}."):
        return False
    parent = path.removeprefix(f"{OWN}.").rpartition(".")[0]
    return bool(parent) and parent not in sections_of(AsyncPipelineConfig)


def _places() -> dict[str, list[str]]:
    """Return the permitted places of each name that is searched for in the whole config."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for key in FOREIGN:
        if not key.unique:
            continue
        found[key.path.rpartition(".")[2]].append(key.path)
    found["async_pipeline"] = [*SWITCHES, OWN]
    for name, paths in _knob_places().items():
        if name not in COMMON:
            found[name] += paths
    for name in PARAMETERS:
        found[name].append(f"{POLICY_LOSS}.{name}")
    return dict(found)


def _knob_places() -> dict[str, list[str]]:
    """Return the places of our knobs by the last part of their path."""
    found: dict[str, list[str]] = {}
    for path in (*knob_paths(), "faults.bad_data"):
        name, place = path.rpartition(".")[2], f"{OWN}.{path}"
        # Kinds of bad data are too deeply nested to be misplaced.
        if path.count(".") < 2 and place not in found.setdefault(name, []):
            found[name].append(place)
    return found


_SECTIONS = tuple(path for path in sections_of(AsyncPipelineConfig) if "." not in path)


def _reject_common(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError if a knob with a common name, or a section, is in a likely wrong place."""
    wrong = [
        (f"{parent}{name}", places)
        for name, places in _knob_places().items()
        if name in COMMON
        for parent in (*HIGHER, *(() if name in ALSO_VERLS else LIKELY))
    ]
    # verl has a section `reward` at the top.
    wrong += [
        (f"{parent}{name}", [f"{OWN}.{name}"])
        for name in _SECTIONS
        for parent in HIGHER
        if f"{parent}{name}" != "reward"
    ]
    for path, places in wrong:
        value = select(raw, path)
        if value is not None:
            if path in VERLS_SECTIONS and not _has_own_knob(path, value):
                places = [VERLS_SECTIONS[path]]
            raise ConfigError(
                f"{path} is misplaced, got {shown(path, value)}; it belongs at {' or '.join(places)}"
            )


def _has_own_knob(section: str, value: Any) -> bool:
    """Return whether a section has a knob of this package."""
    return isinstance(value, Mapping) and any(f"{section}.{name}" in knob_paths() for name in value)


def _check_async_training(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError for a key of verl's fully asynchronous trainer that has no meaning here."""
    section = select(raw, ASYNC_TRAINING)
    if section is None:
        return

    prefix = f"{ASYNC_TRAINING}."
    known = [key.path.removeprefix(prefix) for key in FOREIGN if key.path.startswith(prefix)]
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"{ASYNC_TRAINING} must be a section with some of {', '.join(known)}, got {section!r}; correct it"
        )
    for name, value in section.items():
        if name not in known:
            raise ConfigError(
                f"{ASYNC_TRAINING}.{name} is not supported, got {value!r}; use one of {', '.join(known)}, or "
                "leave it out"
            )


def reject_near_misses(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError for a key that resembles a switch or a short form; verl would ignore it.

    Searches only the levels on which those keys are read.
    """
    known = {key.path.rpartition(".")[2] for key in FOREIGN if key.unique} | {"async_pipeline"}
    for parent in (
        "",
        "actor_rollout_ref",
        "actor_rollout_ref.actor",
        "trainer",
        "trainer.v1",
        "actor_rollout_ref.rollout",
    ):
        node = select(raw, parent) if parent else raw
        for name in node if isinstance(node, Mapping) else ():
            if not isinstance(name, str) or name in known:
                continue
            close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.85)
            if close:
                path = f"{parent}.{name}" if parent else name
                raise ConfigError(
                    f"{path} is unknown, got {shown(path, node[name])}; did you mean {close[0]!r}?"
                )


def unknown_key(path: str, near: str | None = None) -> str:
    """Return the one-line message for a path that hydra does not find in the config.

    `near`: the key of verl's of which it is a misspelling; with a `+`, it would be refused as well.
    """
    if near is not None:
        return f"{path} is not a key of this config; did you mean {near!r}?"
    if not path.startswith(f"{OWN}."):
        return f"{path} is not a key of this config; check its spelling, or write +{path}=... to add it"
    knob = path.removeprefix(f"{OWN}.")
    if knob in mapping_knobs(AsyncPipelineConfig):
        return (
            f"{path} gets no further names without a +; write +{path}={{...}} to add them, and {path}=null "
            "before it to remove the names of the configuration"
        )
    known = {*knob_paths(), *sections_of(AsyncPipelineConfig)}
    if knob in known or knob.startswith(tuple(f"{one}." for one in mapping_knobs(AsyncPipelineConfig))):
        return f"{path} is a knob that this config does not have; write +{path}=... to add it"
    return unknown(AsyncPipelineConfig, knob)
