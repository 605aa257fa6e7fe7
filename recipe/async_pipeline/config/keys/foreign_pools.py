# SPDX-License-Identifier: Apache-2.0
"""Translate layouts of other systems, ratios or lists of stages, into our `pools`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from ...errors import ConfigError
from ..placement import (
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


def pools_of_ratios(ratios: Any) -> dict[str, dict[str, Any]]:
    """Translate `[train, logp, ref_logp, generate]`: equal neighbours share a pool if all then sum to 1.

    `[0.5, 0.5, 0.5, 0.5]` means one pool for the first three and one for generation,
    `[0.25, 0.25, 0.25, 0.25]` means four pools. Raises ConfigError if no sharing, or more than one, fits.
    """
    if not isinstance(ratios, Sequence) or isinstance(ratios, str) or len(ratios) != 4:
        raise ConfigError(
            f"{RATIOS} must be [train, logp, ref_logp, generate], got {ratios!r}; e.g. [0.5,0.5,0.5,0.5]"
        )
    for ratio in ratios:
        check_share(ratio, RATIOS)

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
            f"{RATIOS}: {why}, got {list(ratios)}; make neighbours among train, logp, ref_logp equal to "
            f"share a pool, or set {POOLS}"
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
    """Translate `[[logp, actor-train], ref_logp, generate]` with a share for each entry.

    Raises ConfigError if an entry or its share is wrong.
    """
    if not isinstance(tasks, Sequence) or isinstance(tasks, str) or not tasks:
        raise ConfigError(
            f"{TASKS} must be a list of stages and lists of stages, got {tasks!r}; e.g. "
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
            raise ConfigError(f"{TASKS} must name {name} once, got {tasks!r}; remove one")
        pools[name] = {"roles": roles, "share": float(ratio)}
    wishes_of(pools, TASKS)
    return pools
