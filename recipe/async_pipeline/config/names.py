# SPDX-License-Identifier: Apache-2.0
"""Names of knobs as users write them: flatten sections to paths, refuse unknown and former names."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from ..agents.environment import BUILT_IN
from ..core.bad_data import NO_SCORE
from ..errors import ConfigError
from ..redaction import shown
from .environment_arguments import built_in_arguments
from .fields import knobs_of, sections_of
from .paths import OWN, walk

ALIKE = 0.75
"""Smallest similarity of a misspelled key of verl's and the one that is meant."""
RENAMED: Mapping[str, str] = {
    "max_lag": "staleness.max_lag",
    "depth": "staleness.depth",
    "oldest_share": "staleness.oldest_share",
    "stale": "staleness.straggler",
    "single_mini_batch": "training.single_mini_batch",
    "old_logp": "training.old_logp",
    "ref_refresh_every": "training.ref_refresh_every",
    "sync_every": "weight_sync.every",
    "publish_timeout_s": "weight_sync.timeout_s",
    "in_flight": "weight_sync.in_flight_policy",
    "stage": "weight_sync.load_staging",
    "loads_at_once": "weight_sync.max_concurrent_loads",
    "reuse_prefixes": "weight_sync.reuse_prefixes",
    "proof_tensors": "weight_sync.verify_tensors",
    "preduce_bucket_size_mb": "weight_sync.gather_bucket_size_mb",
    "consume_bucket_size_mb": "weight_sync.load_bucket_size_mb",
    "reward_while_generating": "reward.while_generating",
    "reward_timeout_s": "reward.timeout_s",
    "reward_attempts": "reward.attempts",
    "reward_concurrency": "reward.concurrency",
    "reward_batch": "reward.batch",
    "reward_memory_mb": "reward.memory_mb",
    "reward_cpu_s": "reward.cpu_s",
    "reward_failure": "reward.failure",
    "reward_default": "reward.default",
    "wait_timeout_s": "faults.wait_timeout_s",
    "loop_stall_s": "faults.loop_stall_s",
    "step_down_after": "faults.degrade_after_failures",
    "step_up_after": "faults.restore_after_successes",
    "bad_data": "faults.bad_data",
    "prompt_attempts": "faults.max_prompt_attempts",
    "custom_roles": "custom_stages",
}
"""Former flat names, and the current paths. No path equals a former name."""
_RENAMED_VALUES = {"stale": "; its value resume is now regenerate"}


def current_path(path: str) -> str:
    """Return the current path of a knob, given its current or former path."""
    name = path.removeprefix(f"{OWN}.")
    return f"{OWN}.{RENAMED[name]}" if path != name and name in RENAMED else path


def flattened(root: type, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values below `root` by the paths of their knobs.

    Raises ConfigError for an unknown name, or if a section is not a mapping.
    """
    return _flattened(root, own, "")


def _flattened(root: type, node: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    known, sections = {knob.path for knob in knobs_of(root)}, sections_of(root)
    found: dict[str, Any] = {}

    former = [path for path, _ in walk(node) if path in RENAMED] if not prefix else []
    if former:
        raise ConfigError("; ".join(unknown(root, path) for path in former))

    for name, value in node.items():
        path = f"{prefix}{name}"
        if path in known:
            found[path] = value
        elif path not in sections:
            if isinstance(value, Mapping) and value:
                # The first knob of a section with a wrong name tells which section is meant.
                below, value = next((p, v) for p, v in walk(value) if not (isinstance(v, Mapping) and v))
                path = f"{path}.{below}"
            raise ConfigError(unknown(root, path, f", got {shown(path, value)}"))
        elif isinstance(value, Mapping):
            found |= _flattened(root, value, f"{path}.")
        elif value is not None:
            knobs = ", ".join(knob.name for knob in knobs_of(sections[path]))
            raise ConfigError(f"{OWN}.{path} must be a section, got {value!r}; set one of its knobs: {knobs}")
    return found


def unknown(root: type, path: str, got: str = "") -> str:
    """Return the message for a path below our section that is not a knob, with a current or near path."""
    first, _, rest = path.partition(".")
    if first in RENAMED:
        now = f"{RENAMED[first]}.{rest}" if rest else RENAMED[first]
        return f"{OWN}.{path} is now {OWN}.{now}; rename it{_RENAMED_VALUES.get(first, '')}"
    if path == f"faults.bad_data.{NO_SCORE}":
        return f"{OWN}.{path} is unknown{got}; set {OWN}.reward.failure for responses without a score"
    paths = [knob.path for knob in knobs_of(root)]
    near = _in_mapping(root, path) or _nearest(path, paths)
    if near:
        return f"{OWN}.{path} is unknown{got} (did you mean {near!r}?)"
    close = ", ".join(_resembling(path, paths))
    return f"{OWN}.{path} is unknown{got}; nearest knobs: {close}; `async-pipeline explain --knobs` lists all"


def mapping_knobs(root: type) -> list[str]:
    """Return the paths of the knobs that hold names of the user's, such as arguments."""
    return [knob.path for knob in knobs_of(root) if typing.get_origin(knob.kind) is Mapping]


def _in_mapping(root: type, path: str) -> str | None:
    """Return the place of a name that belongs into a knob with names of the user's, or None.

    The section that it is in is misspelled, or it is an argument of an environment of this package.
    """
    parent, _, name = path.rpartition(".")
    knobs, mappings = knobs_of(root), {one.rpartition(".")[2]: one for one in mapping_knobs(root)}
    section = parent.rpartition(".")[2]
    close = get_close_matches(section, mappings, n=1, cutoff=0.7)
    if section and section not in sections_of(root):
        close += [one for one in mappings if one.endswith(f"_{section}")]
    if close:
        return f"{mappings[close[0]]}.{name}"
    arguments = {one for known in BUILT_IN for one in built_in_arguments(known)}
    of_environments = mappings.get("environment_kwargs")
    if of_environments is None or name not in arguments or name in {knob.name for knob in knobs}:
        return None
    return f"{of_environments}.{name}"


def _resembling(path: str, paths: list[str]) -> list[str]:
    """Return the three paths that resemble a path most, in the last part or as a whole."""
    name = path.rpartition(".")[2]

    def ratio(known: str) -> float:
        last = known.rpartition(".")[2]
        return max(SequenceMatcher(None, *pair).ratio() for pair in ((path, known), (name, last)))

    return sorted(paths, key=ratio, reverse=True)[:3]


def _nearest(path: str, paths: list[str]) -> str | None:
    """Return the knob that a path resembles, in its last part or as a whole, or None."""
    by_name = {known.rpartition(".")[2]: known for known in reversed(paths)}
    name = path.rpartition(".")[2]
    same = [known for known in paths if known.rpartition(".")[2] == name]
    if same:
        return max(same, key=lambda known: SequenceMatcher(None, path, known).ratio())
    if name in RENAMED:
        return RENAMED[name]
    words = set(name.split("_"))
    holding = [known for known in paths if len(words) > 1 and words <= set(re.split("[._]", known))]
    if holding:
        return min(holding, key=len)
    near = get_close_matches(path, paths, n=1, cutoff=0.8)
    if near:
        return near[0]
    close = get_close_matches(name, list(by_name), n=1)
    return by_name[close[0]] if close else None
