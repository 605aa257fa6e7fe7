# SPDX-License-Identifier: Apache-2.0
"""Assign stages to devices.

A *wish* names a pool, its stages (`roles` in the config) and its size, as a number of devices or as a share
of all. `place` turns wishes into pools of whole devices. Pure arithmetic; imports neither verl nor ray.

Shares become whole devices by the largest remainder method: each pool gets the whole part of
share x devices, and the rest is assigned to the pools with the largest fractions, in order. A pool fits into
one node or takes whole nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError
from .paths import OWN, hint, select

MOST_DEVICES = 1_000_000
"""Upper bound for nodes and for devices of a node; a larger number is a typing error."""
PLACED = ("train", "logp", "ref_logp", "critic", "generate")
"""Stages that compute on devices. `param_update` gathers on the devices of train; the critic computes the
values on its own."""
TEACHER = "teacher"
"""The stage of teachers, and their pool."""
ALIASES = {
    "actor_train": "train",
    "actor": "train",
    "actor_forward_logp": "logp",
    "old_logp": "logp",
    "ref": "ref_logp",
    "rollout": "generate",
    "rollout_generate": "generate",
}
POOLS = f"{OWN}.pools"
RATIOS, TASKS, TASK_RATIOS = (
    "trainer.use_nodes_ratios",
    "trainer.sperated_node_tasks",
    "trainer.sperated_node_ratios",
)
TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"
TOLERANCE = 1e-3
"""Permits shares that are rounded to three digits."""


@dataclass(frozen=True)
class Pool:
    """Devices and the stages that share them."""

    name: str
    roles: tuple[str, ...]
    per_node: tuple[int, ...]
    """Devices on each node that the pool uses."""

    @property
    def devices(self) -> int:
        return sum(self.per_node)


@dataclass(frozen=True)
class Wish:
    """A requested pool. Either `devices` or `share` is set."""

    name: str
    roles: tuple[str, ...]
    devices: int | None = None
    share: float | None = None


@dataclass(frozen=True)
class Placement:
    """All pools of a run; each stage that computes is on exactly one."""

    pools: tuple[Pool, ...]

    def pool_of(self, role: str) -> Pool | None:
        """Return the pool of a stage, or None if the run lacks the stage or it needs no device."""
        return next((pool for pool in self.pools if role in pool.roles), None)

    def own_pool_of(self, role: str) -> Pool | None:
        """Return the pool of a stage, or None if it shares the training devices or the run lacks it."""
        pool = self.pool_of(role)
        return None if pool is None or "train" in pool.roles else pool

    def without(self, role: str) -> Placement:
        """Return the placement of a run that lacks a stage; its pool has others."""
        pools = (replace(pool, roles=tuple(r for r in pool.roles if r != role)) for pool in self.pools)
        return Placement(tuple(pools))

    @property
    def devices(self) -> int:
        return sum(pool.devices for pool in self.pools)

    def as_list(self) -> list[dict[str, Any]]:
        """Return plain values, from which `from_list` makes an equal placement."""
        return [{"name": p.name, "roles": list(p.roles), "per_node": list(p.per_node)} for p in self.pools]

    @classmethod
    def from_list(cls, plain: Iterable[Mapping[str, Any]]) -> Placement:
        return cls(tuple(Pool(str(p["name"]), tuple(p["roles"]), tuple(p["per_node"])) for p in plain))


def placement_of(
    config: Mapping[str, Any], pools: Mapping[str, Any] | None, roles: Sequence[str], path: str = POOLS
) -> Placement:
    """Place the stages of a run. Raises ConfigError if they do not fit.

    `config` is verl's, `roles` holds the stages of `PLACED` that the run has, and `path` is the key that
    `pools` was set by.
    """
    sizes, problems = {}, list[str]()
    for size_path in (
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
        "actor_rollout_ref.rollout.nnodes",
        "actor_rollout_ref.rollout.n_gpus_per_node",
    ):
        value = select(config, size_path)
        least = 0 if "rollout" in size_path and pools is not None else 1
        why = (
            "generation needs its own devices; set their number"
            if "rollout" in size_path
            else "training needs devices"
        )
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            problems.append(f"{size_path} must be >= {least}, got {value!r}; {why}")
        elif value > MOST_DEVICES:
            problems.append(f"{size_path} must be at most {MOST_DEVICES}, got {value!r}; {why}")
        else:
            sizes[size_path] = value
    if problems:
        raise ConfigError(*problems)

    nodes, node, more, size = sizes.values()
    if pools is None:
        training = tuple(role for role in roles if role != "generate")
        two = Pool("train", training, (node,) * nodes), Pool("generate", ("generate",), (size,) * more)
        return _with_teachers(Placement(two), config)
    largest = max(node, size) if more else node
    replica = select(config, TENSOR_PARALLEL)
    placement = place(
        wishes_of(pools),
        roles=roles,
        devices=nodes * node + more * size,
        node=largest,
        path=path,
        replica=replica if isinstance(replica, int) else 1,
    )
    return _with_teachers(placement, config)


def _with_teachers(placement: Placement, config: Mapping[str, Any]) -> Placement:
    """Add the devices of the teachers, which verl's own keys say, if there are any.

    Raises ConfigError if another pool has their name.
    """
    nodes, node = (int(select(config, f"distillation.{key}") or 0) for key in ("nnodes", "n_gpus_per_node"))
    if not select(config, "distillation.enabled") or nodes * node < 1:
        return placement
    if any(pool.name == TEACHER for pool in placement.pools):
        raise ConfigError(
            f"{POOLS}.{TEACHER} must have another name, since distillation.nnodes and "
            "distillation.n_gpus_per_node make the pool of that name; rename it"
        )
    return Placement((*placement.pools, Pool(TEACHER, (TEACHER,), (node,) * nodes)))


def wishes_of(pools: Any, path: str = POOLS) -> tuple[Wish, ...]:
    """Parse `{name: {roles: [...], devices: 2}}`, or with `share: 0.25`. Raises ConfigError if wrong."""
    if not isinstance(pools, Mapping) or not pools:
        raise ConfigError(
            f"{path} must map names of pools to roles and sizes, got {pools!r}; e.g. {{a: {{roles: "
            "[train], devices: 2}}"
        )
    wishes = tuple(_wish(str(name), pool, f"{path}.{name}") for name, pool in pools.items())
    seen: dict[str, str] = {}
    for wish in wishes:
        for role in wish.roles:
            if role in seen:
                raise ConfigError(
                    f"{path} must name {role} once, got it in {seen[role]} and {wish.name}; remove one"
                )
            seen[role] = wish.name
        if "generate" in wish.roles and len(wish.roles) > 1:
            raise ConfigError(
                f"{path}.{wish.name}.roles must be [generate] alone, got {list(wish.roles)}; move the others "
                "to another pool, since engines keep their devices"
            )

    for role in ("train", "generate"):
        if role not in seen:
            raise ConfigError(f"{path} must have a pool for {role}, got {', '.join(seen)}; add one")
    if len({wish.share is None for wish in wishes}) > 1:
        raise ConfigError(f"{path} must give all sizes as devices or all as shares, got both; choose one")
    return wishes


def _wish(name: str, pool: Any, path: str) -> Wish:
    if not isinstance(pool, Mapping):
        raise ConfigError(
            f"{path} must have roles and devices or share, got {pool!r}; e.g. {{roles: [train], devices: 2}}"
        )
    for key in pool:
        if key not in ("roles", "devices", "share"):
            raise ConfigError(
                f"{path}.{key} is unknown, got {pool[key]!r}; a pool has roles, and devices or share"
            )

    roles = pool.get("roles")
    if not isinstance(roles, Sequence) or isinstance(roles, str) or not roles:
        raise ConfigError(f"{path}.roles must be a list of roles, got {roles!r}; of {', '.join(PLACED)}")

    devices, share = pool.get("devices"), pool.get("share")
    if (devices is None) == (share is None):
        raise ConfigError(
            f"{path} must have devices or share, got {'neither' if devices is None else 'both'}; give one "
            "of them"
        )
    if devices is not None and (isinstance(devices, bool) or not isinstance(devices, int) or devices < 1):
        raise ConfigError(
            f"{path}.devices must be a whole number >= 1, got {devices!r}; leave the pool out for none"
        )
    if share is not None:
        check_share(share, f"{path}.share")
    return Wish(name, tuple(role_called(role, f"{path}.roles") for role in roles), devices, share)


def check_share(share: Any, path: str) -> None:
    """Raises ConfigError if this is not a share of all devices."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"{path} must be above 0 and at most 1, got {share!r}; 1 is all devices")


def role_called(name: Any, path: str) -> str:
    """Return the stage that a name or an alias means. Raises ConfigError if there is no such stage."""
    text = str(name).replace("-", "_").lower()
    role = ALIASES.get(text, text)
    if role not in PLACED:
        raise ConfigError(
            f"{path} must be of {', '.join(PLACED)}, got {name!r}{hint(role, (*PLACED, *ALIASES))}; other "
            "stages need no device"
        )
    return role


def place(
    wishes: Sequence[Wish],
    *,
    roles: Sequence[str],
    devices: int,
    node: int,
    path: str = POOLS,
    replica: int = 1,
    full_nodes: bool = True,
) -> Placement:
    """Assign whole devices to each wish. Raises ConfigError, with the nearest possible sizes, if one fails.

    `roles` holds the stages of `PLACED` that the run has; stages that no wish names share the training
    devices. `devices` counts all devices, `node` the devices of one node, and `replica` the devices of one
    replica. Unless `full_nodes`, one node has only the devices that are left for it.
    """
    wished = {role for wish in wishes for role in wish.roles}
    rest = tuple(role for role in roles if role not in wished)
    kept = []
    for wish in wishes:
        here = tuple(role for role in wish.roles if role in roles)
        if not here:
            raise ConfigError(
                f"{path}: this run has no {' or '.join(wish.roles)}, so the devices of pool {wish.name} "
                f"would be idle; {_without(wish, wishes, path)}"
            )
        kept.append((wish, (*here, *rest) if "train" in here else here))

    counts = _whole_devices([wish for wish, _ in kept], devices, path)
    if sum(counts) > devices:
        raise ConfigError(
            f"{path}: the pools must fit into the {devices} devices of trainer.{{nnodes,n_gpus_per_node}} "
            "and actor_rollout_ref.rollout.{nnodes,n_gpus_per_node} together, got "
            f"{sum(counts)}; make some smaller, or raise these numbers"
        )
    pools = tuple(
        Pool(wish.name, here, _on_nodes(wish.name, count, node, path))
        for (wish, here), count in zip(kept, counts, strict=True)
    )
    left = [node] * -(-devices // node)
    if not full_nodes and devices % node:
        left[0] = devices % node
    _check_packing(pools, left, node, max(1, replica), path)
    return Placement(pools)


def _without(unused: Wish, wishes: Sequence[Wish], path: str) -> str:
    """Return the remedy for a pool without a stage of the run."""
    asked = (
        " (actor_rollout_ref.actor.use_kl_loss=True asks for a reference)"
        if unused.roles == ("ref_logp",)
        else ""
    )
    if path != RATIOS:
        return f"remove it{asked}"
    left = [
        replace(wish, share=(wish.share or 0) + (unused.share or 0)) if "generate" in wish.roles else wish
        for wish in wishes
        if wish is not unused
    ]
    pools = ",".join(f"{wish.name}:{{roles:[{','.join(wish.roles)}],share:{wish.share:g}}}" for wish in left)
    return f"use {POOLS}={{{pools}}} instead{asked}"


def _check_packing(pools: Sequence[Pool], left: list[int], node: int, replica: int, path: str) -> None:
    """Pack first fit, largest first, replicas last; a replica larger than a node takes whole nodes.

    `left` has the free devices of each node, and changes.

    Raises ConfigError if no node has enough devices left for a pool or a replica, or too few are whole.
    """
    nodes = len(left)
    parts = [(part, pool.name) for pool in pools if "generate" not in pool.roles for part in pool.per_node]
    begin = 0
    for part, name in sorted(parts, reverse=True):
        while begin < nodes and not left[begin]:
            begin += 1
        free = next((i for i in range(begin, nodes) if left[i] >= part), None)
        if free is None:
            raise _does_not_fit(f"pool {name}", part, left, node, path)
        left[free] -= part

    for pool in pools:
        if "generate" not in pool.roles:
            continue
        if replica > node:
            whole, needed = left.count(node), len(pool.per_node)
            if pool.devices >= replica and whole < needed:
                raise ConfigError(
                    f"{path}: pool {pool.name} needs {needed} whole nodes of {node} devices for replicas of "
                    f"{replica}, but the others leave {whole} of {nodes} nodes whole; make a pool smaller"
                )
        elif sum(free // replica for free in left) < pool.devices // replica:
            room = [free % replica for free in left]
            raise _does_not_fit(f"a replica of pool {pool.name}", replica, room, node, path)


def _does_not_fit(what: str, part: int, left: Sequence[int], node: int, path: str) -> ConfigError:
    return ConfigError(
        f"{path}: {what} needs {part} devices of one node, but the others leave at most {max(left)} on any "
        f"of {len(left)} nodes of {node}; make a pool smaller"
    )


def _whole_devices(wishes: Sequence[Wish], devices: int, path: str) -> list[int]:
    if wishes[0].share is None:
        return [int(wish.devices or 0) for wish in wishes]
    shares = [float(wish.share or 0) for wish in wishes]
    if abs(sum(shares) - 1) > TOLERANCE:
        raise ConfigError(
            f"{path}: the shares must sum to 1, got {' + '.join(f'{s:g}' for s in shares)} = "
            f"{sum(shares):g}; change one"
        )

    counts = [math.floor(share * devices + TOLERANCE) for share in shares]
    by_fraction = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * devices)
    for i in by_fraction[: devices - sum(counts)]:
        counts[i] += 1

    for wish, count in zip(wishes, counts, strict=True):
        if count == 0:
            least = math.ceil(1 / min(shares) - TOLERANCE)
            raise ConfigError(
                f"{path}: pool {wish.name} gets no device, its share of {devices} is "
                f"{float(wish.share or 0) * devices:g}; raise it to {1 / devices:.3g} and lower another, or "
                f"use {least} devices (trainer and rollout together)"
            )
    return counts


def _on_nodes(name: str, devices: int, node: int, path: str) -> tuple[int, ...]:
    if devices <= node:
        return (devices,)
    if devices % node:
        below, above = devices // node * node, -(-devices // node) * node
        raise ConfigError(
            f"{path}: pool {name} must be within a node of {node} devices (trainer.n_gpus_per_node) or "
            f"take whole nodes, got {devices}; nearest are {below} and {above}"
        )
    return (node,) * (devices // node)
