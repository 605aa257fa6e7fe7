# SPDX-License-Identifier: Apache-2.0
"""Refuse keys that verl would ignore although they are meant for us: misplaced or misspelled ones.

A key with the name of a knob, of a section of knobs or of a key of `aliases.FOREIGN` is misplaced

    in a section that contains the section of the knobs;
    anywhere, if its section has the right name too, as in `somewhere.staleness.max_lag`;
    in a section of verl that has no such key (`verl_bridge.spelling`, which reads verl's keys).

In other sections, which code of the user reads, such names may mean something else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any

from ...errors import ConfigError
from ...redaction import shown
from ..checks.rollout_correction import PARAMETERS, POLICY_LOSS
from ..knobs.fields import mapping_knobs, sections_of, unknown
from ..knobs.schema import AsyncPipelineConfig, knob_paths
from ..paths import OWN, RUNTIME, nearest, select, walk
from .aliases import FOREIGN

SWITCHES = ("async_pipeline", "actor_rollout_ref.async_pipeline")
ASYNC_TRAINING = "async_training"
ON_THE_WAY = ("", "trainer", "trainer.v1")
"""The sections that contain the section of the knobs."""
ALSO_VERLS = "reward"
"""A section of verl there that has the name of a section of knobs."""
ALIKE = 0.75
"""Smallest similarity of a misspelled key and the one that is meant, if the section is known."""
ALIKE_AMONG_VERLS = 0.85
"""The same among keys of verl, which are unknown here: `dtype` resembles `sde_type`."""
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


def reject_misplaced(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError if a key of this package is misspelled, or is where no code reads it."""
    if select(raw, RUNTIME) is not None:
        raise ConfigError(f"{RUNTIME} is written when a run is launched; remove it, knobs belong below {OWN}")
    for name in FILES_OF.keys() & raw.keys():
        raise ConfigError(
            f"{name} is a key of another system's file, got {shown(name, raw[name])}; translate the file by "
            f"`async-pipeline translate {FILES_OF[name]} FILE`"
        )
    # Keys first, since their places say more than the ones of their sections.
    for path, value in sorted(walk(raw), key=lambda entry: -entry[0].count(".")):
        parent, _, name = path.rpartition(".")
        on_the_way = parent in ON_THE_WAY and path != ALSO_VERLS
        end = f".{parent.rpartition('.')[2]}.{name}"
        if on_the_way or any(place.endswith(end) for place in _places().get(name, ())):
            reject_in_place(path, value, raw)
    reject_near_misses(raw)
    _check_async_training(raw)


def reject_in_place(path: str, value: Any, raw: Mapping[str, Any]) -> None:
    """Raises ConfigError if a key has one of our names, but is not where that is read."""
    name = path.rpartition(".")[2]
    places = _places().get(name, ())
    if value is None or not places or path in places or path.startswith(f"{OWN}."):
        return
    # verl has sections of these names, too.
    verls = [p for p, v in walk(raw) if isinstance(value, Mapping) and isinstance(v, Mapping) and p != path]
    more = [p for p in verls if p.rpartition(".")[2] == name and p not in places]
    raise ConfigError(
        f"{path} is misplaced, got {shown(path, value)}; it belongs at {' or '.join([*places, *more])}, with "
        "++ if this config has no such key"
    )


@cache
def _places() -> Mapping[str, tuple[str, ...]]:
    """Return where keys of each of our names are read."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for key in FOREIGN:
        if key.unique:
            found[key.path.rpartition(".")[2]].append(key.path)
    found["async_pipeline"] = [*SWITCHES, OWN]
    for path in (*knob_paths(), *sections_of(AsyncPipelineConfig)):
        # Deeper ones, such as kinds of bad data, are not misplaced.
        if path.count(".") < 2:
            found[path.rpartition(".")[2]].append(f"{OWN}.{path}")
    for name in PARAMETERS:
        found[name].append(f"{POLICY_LOSS}.{name}")
    return {name: tuple(places) for name, places in found.items()}


def is_own(path: str) -> bool:
    """Return whether this package reads a key, also if the config does not have it."""
    if path.startswith(f"{OWN}."):
        return path.removeprefix(f"{OWN}.") in {*knob_paths()} - {*mapping_knobs(AsyncPipelineConfig)}
    return path in _places().get(path.rpartition(".")[2], ())


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
    """Raises ConfigError for a misspelled switch or key of `aliases.FOREIGN`, which verl would ignore."""
    for parent, known in _read_in().items():
        node = select(raw, parent) if parent else raw
        for name in node if isinstance(node, Mapping) else ():
            if not isinstance(name, str) or name in _places():
                continue
            near = None if name in known else nearest(name, known, ALIKE_AMONG_VERLS)
            if near is not None:
                path = f"{parent}.{name}".lstrip(".")
                raise ConfigError(f"{path} is unknown, got {shown(path, node[name])}; did you mean {near!r}?")


@cache
def _read_in() -> Mapping[str, list[str]]:
    """Return the names that this package reads in each section of verl."""
    found: defaultdict[str, list[str]] = defaultdict(list, {"": [ASYNC_TRAINING]})
    for path in (*(key.path for key in FOREIGN if key.unique), *SWITCHES, OWN):
        parent, _, name = path.rpartition(".")
        found[parent].append(name)
    return found


def unknown_key(
    path: str,
    near: str | None = None,
    *,
    given: bool = False,
    read: bool = True,
    fixed: bool = False,
    engine: str = "",
) -> str:
    """Return the one-line message for a path that hydra does not find in the config.

    `near`: the key of verl's of which it is a misspelling; with a `+`, it would be refused as well.
    `given`: whether that key is set, too.
    `read`: whether code of verl may read it, as it does some keys that its configuration does not have.
    `fixed`: whether the section has a class, which takes no further keys.
    `engine`: the value of `model_engine` with which alone a config has the key.
    """
    if near is not None:
        meant = f"leave it out: {near!r} is set, too" if given else f"did you mean {near!r}?"
        return f"{path} is not a key of this config; {meant}"
    if is_own(path):  # another first word: problems of its value have another line
        return f"+{path} must be written with its +, since this config has no such key; write +{path}=..."
    if not path.startswith(f"{OWN}."):
        return _unknown_to_verl(path, read=read, fixed=fixed, engine=engine)
    knob = path.removeprefix(f"{OWN}.")
    mappings = mapping_knobs(AsyncPipelineConfig)
    if knob in mappings:
        return (
            f"{path} gets no further names without a +; write +{path}={{...}} to add them, and {path}=null "
            "before it to remove the names of the configuration"
        )
    if knob in sections_of(AsyncPipelineConfig) or knob.startswith(
        tuple(f"{mapping}." for mapping in mappings)
    ):
        return f"{path} is a knob that this config does not have; write +{path}=... to add it"
    return unknown(AsyncPipelineConfig, knob)


ONLY_VALUES = {"actor_rollout_ref.actor.megatron.router_replay.mode": "R2"}
"""The only other value than its default that a key of one engine may have."""


def _unknown_to_verl(path: str, *, read: bool, fixed: bool, engine: str) -> str:
    places = _places().get(path.rpartition(".")[2], ())
    if places:
        return f"{path} is not a key of this config; leave it out, or set ++{' or ++'.join(places)}"
    if engine:
        value = f", with {path}={ONLY_VALUES[path]}" if path in ONLY_VALUES else ""
        return f"{path} is a key of model_engine={engine}; set that{value}, or leave the key out"
    if path.partition(".")[0] in (ASYNC_TRAINING, "rollout"):
        return f"{path} is not a key of this config, and not supported; leave it out"
    if fixed:
        return f"{path} is not a key of this config, nor of its section's class; leave it out"
    if not read:
        return (
            f"{path} is not a key of this config, and no code of verl reads it; leave it out, or write "
            f"+{path}=... for code of yours that does"
        )
    return f"{path} is not a key of this config; check its spelling, or write +{path}=... to add it"
