# SPDX-License-Identifier: Apache-2.0
"""Devices and batches of a simulation, by the rules of real runs: whole nodes, batches that divide evenly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ...config.checks.divisibility import check_divides, check_replicas
from ...config.checks.user_classes import schedule_at
from ...config.knobs.schema import DEFAULT_AHEAD, AsyncPipelineConfig, canonical_strategy
from ...config.placement import Placement, Pool, place, wishes_of
from ...errors import ConfigError
from .profile import Profile
from .simulated.trainer import Setting

BATCH_SLACK = 0.05
"""A batch that grows with the cluster may differ by this share, so that it divides evenly."""
SIMILAR = 0.25
"""A smaller cluster's split is comparable if its smaller half is off by no more than this share."""
SHAPES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "together": (("train", "logp", "ref_logp", "critic"),),
    "reference apart": (("train", "logp", "critic"), ("ref_logp",)),
    "log-probs apart": (("train", "critic"), ("logp", "ref_logp")),
    "four pools": (("train", "critic"), ("logp",), ("ref_logp",)),
    "critic apart": (("train", "logp", "ref_logp"), ("critic",)),
    "critic and reference apart": (("train", "logp"), ("critic",), ("ref_logp",)),
}
"""Which stages share devices, generation aside.

Stages that a run does not have are left out; shapes that are equal then count once.
"""


def pools_of(sizes: Mapping[tuple[str, ...], int], generate: int) -> dict[str, dict[str, Any]]:
    """Return the value of `pools` for these roles and sizes."""
    pools = {roles[0]: {"roles": list(roles), "devices": devices} for roles, devices in sizes.items()}
    return pools | {"generate": {"roles": ["generate"], "devices": generate}}


def placement_of(profile: Profile, pools: Any, devices: int, path: str = "--pools") -> Placement:
    """Return the placement of `pools`, checked as in a real run. Raises ConfigError if it is impossible."""
    placement = place(
        wishes_of(pools, path),
        roles=profile.roles(),
        devices=devices,
        node=profile.devices_per_node,
        path=path,
        replica=profile.devices_per_replica,
        full_nodes=False,
    )

    generate = placement.pool_of("generate")
    assert generate is not None, "wishes_of requires one"
    if generate.devices % profile.devices_per_replica:
        below = generate.devices // profile.devices_per_replica * profile.devices_per_replica
        raise ConfigError(
            f"{path}: generate must have whole replicas of {profile.devices_per_replica} devices, got "
            f"{generate.devices}; the nearest sizes are {below} and {below + profile.devices_per_replica}"
        )
    check_replicas(generate, profile.devices_per_replica, "devices_per_replica of the profile")
    return placement


def shared_placement(profile: Profile, devices: int) -> Placement:
    """Return the synchronous layout: all devices train and generate in turn.

    Devices that do not fill a replica only train.
    """
    return Placement((Pool("all", profile.roles(), (devices,)),))


def groups_of(profile: Profile, placement: Placement, devices: int | None = None) -> int:
    """Return the groups per step, such that samples divide evenly over every pool that computes on them.

    `devices` is the size of the cluster, if it has more devices than the placement.

    Raises ConfigError if the profile's number does not, nor any within BATCH_SLACK of it if the batch grows
    with the cluster.
    """
    others = [pool for pool in placement.pools if "generate" not in pool.roles]
    devices = devices or placement.devices
    groups = fitting_groups(profile, devices, [pool.devices for pool in others])
    if groups is not None:
        return groups

    wanted = profile.batch.on(devices) * profile.batch.answers
    for pool in others:
        check_divides(pool, wanted, "batch.groups x batch.answers of the profile")
    raise AssertionError("a batch that every pool divides fits")


def fitting_groups(profile: Profile, devices: int, sizes: Sequence[int]) -> int | None:
    """Return the groups per step on a cluster of `devices` that pools of these sizes divide, or None."""
    wanted, n = profile.batch.on(devices), profile.batch.answers
    unit = math.lcm(*(size // math.gcd(size, n) for size in sizes))
    fitting = max(1, round(wanted / unit)) * unit
    slack = max(BATCH_SLACK * wanted, 0.5) if profile.batch.groups is None else 0
    return fitting if abs(fitting - wanted) <= slack else None


def rollout_unit(profile: Profile, devices: int) -> int:
    """Return the devices by which the rollout's pool grows beyond a node: whole replicas on whole nodes."""
    return math.lcm(
        profile.devices_per_replica, 1 if devices <= profile.devices_per_node else profile.devices_per_node
    )


def largest_size(profile: Profile, devices: int, role: str, most: int, least: int = 0) -> int:
    """Return the largest size of a role's pool that a run accepts, above `least` and up to `most`, or 0.

    Only the pool itself matters: it is within a node or takes whole nodes, has whole replicas if it is the
    rollout's, and divides the batch of a cluster of `devices` if it is not.
    """
    node, replica = profile.devices_per_node, profile.devices_per_replica
    unit = replica if role == "generate" else 1
    whole = math.lcm(node, unit)
    sizes = chain(
        range(most // whole * whole, max(node, least), -whole) if whole in (node, replica) else (),
        range(min(most, node) // unit * unit, least, -unit),
    )
    accepted = (n for n in sizes if role == "generate" or fitting_groups(profile, devices, [n]) is not None)
    return next(accepted, 0)


def fits(profile: Profile, pools: Mapping[str, Any], devices: int) -> bool:
    """Return whether these pools can be placed on the devices, and divide a batch."""
    return Rejections().check(profile, pools, devices) is not None


@dataclass
class Rejections:
    """Why layouts of a search do not fit."""

    tried: int = 0
    placements: list[str] = field(default_factory=list)
    """Why devices cannot be placed, a reason for each such layout."""
    batches: list[str] = field(default_factory=list)
    """Why the samples do not divide evenly, a reason for each layout whose devices can be placed."""

    def check(self, profile: Profile, pools: Mapping[str, Any], devices: int) -> tuple[Placement, int] | None:
        """Return the placement of `pools` and the groups per step, or None if the layout does not fit."""
        path = ", ".join(f"{name} {pool['devices']}" for name, pool in pools.items())
        self.tried += 1
        try:
            placement = placement_of(profile, pools, devices, path)
        except ConfigError as error:
            self.placements.append(f"{path}: {str(error).removeprefix(f'{path}: ')}")
            return None
        try:
            return placement, groups_of(profile, placement, devices)
        except ConfigError as error:
            self.batches.append(f"{path}: {error}")
            return None

    def describe(self) -> str:
        """Return the reason of the layouts that come closest: devices that cannot be placed need no batch.

        One layout stands for all that fail for the same reason.
        """
        reasons = self.batches or self.placements
        remedy = "; use another number of devices or another batch" if self.batches else ""
        one = reasons[len(reasons) // 2]
        which = f"{len(reasons)} of {self.tried} layouts fail like this one"
        return f"{which if self.tried > 1 else 'the only layout fails'}: {one}{remedy}"


def knobs_of(
    strategy: str,
    max_lag: int | None = None,
    depth: int | None = None,
    *,
    straggler: str = "wait",
    sync_every: int = 1,
) -> AsyncPipelineConfig:
    """Return the settings of a strategy. Raises ConfigError if it is unknown or contradicts an option."""
    name = canonical_strategy(strategy, "--strategy")
    implied = schedule_at(name, "--strategy").implied_lag
    if max_lag is None:
        max_lag = DEFAULT_AHEAD if implied is None else implied

    return AsyncPipelineConfig.of(
        {
            "strategy": name,
            "staleness.max_lag": max_lag,
            "staleness.depth": depth,
            "staleness.straggler": straggler,
            "weight_sync.every": sync_every,
        }
    )


def smaller(setting: Setting) -> Setting | None:
    """Return the same shape on a quarter of the devices (or a third, or a half), or None if none is possible.

    The split is as similar as whole nodes, whole replicas and evenly divided batches allow.
    """
    profile, pools = setting.profile, setting.placement.pools
    for factor in (4, 3, 2):
        devices = setting.placement.devices // factor
        unit = rollout_unit(profile, devices)

        wanted = setting.devices_of("generate") / factor
        off = SIMILAR * min(wanted, devices - wanted)
        sizes = sorted(
            (abs(size - wanted), size) for size in range(unit, devices, unit) if abs(size - wanted) <= off
        )

        for _, generate in sizes:
            found = _split_alike([pool for pool in pools if "generate" not in pool.roles], devices - generate)
            if found is None:
                continue
            try:
                placement = placement_of(profile, pools_of(found, generate), devices)
                return replace(setting, placement=placement, groups=groups_of(profile, placement))
            except ConfigError:
                continue
    return None


def _split_alike(pools: Sequence[Pool], devices: int) -> dict[tuple[str, ...], int] | None:
    """Return this many devices in the proportions of `pools`; the first pool gets the remainder.

    Returns None if a pool would get no device.
    """
    first, *others = pools
    total = sum(pool.devices for pool in pools)
    sizes = {pool.roles: max(1, round(pool.devices / total * devices)) for pool in others}
    left = devices - sum(sizes.values())
    return {first.roles: left, **sizes} if left > 0 else None


def shapes(profile: Profile) -> Mapping[str, tuple[tuple[str, ...], ...]]:
    """Return the entries of SHAPES that differ for the roles of this profile."""
    there = set(profile.roles())
    found: dict[str, tuple[tuple[str, ...], ...]] = {}
    for name, groups in SHAPES.items():
        kept = tuple(kept for group in groups if (kept := tuple(role for role in group if role in there)))
        if kept not in found.values():
            found[name] = kept
    return found
