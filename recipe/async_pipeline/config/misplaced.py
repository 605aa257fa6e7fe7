# SPDX-License-Identifier: Apache-2.0
"""Find keys that verl would ignore although they are meant for us: misplaced, misspelled or unknown ones."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..redaction import shown
from .aliases import FOREIGN
from .knobs import sections_of
from .names import RENAMED, unknown
from .paths import OWN, RUNTIME, select, walk
from .rollout_correction import PARAMETERS, POLICY_LOSS
from .schema import AsyncPipelineConfig, knob_paths

SWITCHES = ("async_pipeline", "actor_rollout_ref.async_pipeline")
ASYNC_TRAINING = "async_training"
COMMON = frozenset(
    {"strategy", "run_dir", "pools", "validation", "depth", "every", "timeout_s", "failure", "default"}
    | {"attempts", "concurrency", "batch", "memory_mb", "cpu_s", "stage", "stale"}
)
"""Names of knobs, now or before, that other software uses for keys of its own. They are looked for only in
`HIGHER` and `BESIDE`; all other names are looked for in the whole config.
"""
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


def reject_misplaced(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError if one of our keys stands where nothing would read it, or almost one of them."""
    if select(raw, RUNTIME) is not None:
        raise ConfigError(f"{RUNTIME} is written by the launch of a run; remove it, knobs belong below {OWN}")
    places = _places()
    for path, value in walk(raw):
        leaf = path.rpartition(".")[2]
        # `names` says where a knob is now whose flat name of before was used.
        before = leaf in RENAMED and path == f"{OWN}.{leaf}"
        if leaf in places and path not in places[leaf] and not before:
            raise ConfigError(
                f"{path} is misplaced, got {shown(path, value)}; it belongs at {' or '.join(places[leaf])}"
            )
    _reject_common(raw)
    reject_near_misses(raw)
    _check_async_training(raw)


def _places() -> dict[str, list[str]]:
    """Where each name may stand that is searched for in the whole config."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for key in FOREIGN:
        found[key.path.rpartition(".")[2]].append(key.path)
    found["async_pipeline"] = [*SWITCHES, OWN]
    for name, paths in _ours().items():
        if name not in COMMON:
            found[name] += paths
    for name in PARAMETERS:
        found[name].append(f"{POLICY_LOSS}.{name}")
    return dict(found)


def _ours() -> dict[str, list[str]]:
    """Places of our knobs by their last part, and by their names of before."""
    found = {name: [f"{OWN}.{path}"] for name, path in RENAMED.items()}
    for path in (*knob_paths(), "faults.bad_data"):
        name, place = path.rpartition(".")[2], f"{OWN}.{path}"
        # Kinds of bad data are too far down to be looked for.
        if path.count(".") < 2 and place not in found.setdefault(name, []):
            found[name].append(place)
    return found


_SECTIONS = tuple(path for path in sections_of(AsyncPipelineConfig) if "." not in path)


def _reject_common(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError if a knob with a common name, or a section, stands in a likely wrong place."""
    wrong = [
        (f"{parent}{name}", places)
        for name, places in _ours().items()
        if name in COMMON
        for parent in (*HIGHER, *(() if name == "strategy" else BESIDE))
    ]
    # `reward` is a section of verl.
    wrong += [
        (f"{parent}{name}", [f"{OWN}.{name}"])
        for name in _SECTIONS
        for parent in HIGHER
        if f"{parent}{name}" != "reward"
    ]
    for path, places in wrong:
        value = select(raw, path)
        if value is not None:
            raise ConfigError(
                f"{path} is misplaced, got {shown(path, value)}; it belongs at {' or '.join(places)}"
            )


def _check_async_training(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError if the section of verl's fully asynchronous trainer has keys that have no meaning
    here.
    """
    theirs = select(raw, ASYNC_TRAINING)
    if theirs is None:
        return
    prefix = f"{ASYNC_TRAINING}."
    known = [key.path.removeprefix(prefix) for key in FOREIGN if key.path.startswith(prefix)]
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
    """Raises ConfigError for a key that verl does not know and that is almost a short form or switch of ours.

    Looks at the levels on which those stand; verl would ignore the key.
    """
    ours = {key.path.rpartition(".")[2] for key in FOREIGN} | {"async_pipeline"}
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


def unknown_key(path: str) -> str:
    """What to say, in one line, of a path that hydra finds in no config."""
    if not path.startswith(f"{OWN}."):
        return f"{path} is not a key of this config; check its spelling, or write +{path}=... to add it"
    ours = path.removeprefix(f"{OWN}.")
    if ours in knob_paths() or ours in sections_of(AsyncPipelineConfig):
        return f"{path} is a knob that this config does not have; write +{path}=... to add it"
    return unknown(AsyncPipelineConfig, ours)
