# SPDX-License-Identifier: Apache-2.0
"""The layouts, strategies and lags that a search considers, each with an estimate and bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...config.schema import AsyncPipelineConfig
from .bound import bound_terms, estimate_s, work_of
from .layout import Rejections, knobs_of, pools_of, shapes
from .profile import Profile, Stage
from .simulation import LEAST_STEPS, whole_rounds
from .trainer import Setting

SPLITS = 24
"""Sizes of the rollout pool that are tried, evenly spaced."""
MEASURED_STEPS = 12
"""Averaged steps of a simulation, at most; a finalist has twice as many."""
MEASURED_TURNS = 160_000
"""Turns in the averaged steps of a simulation, about: steps with many turns differ little from each other."""
FILL_IF_LONG = 1
"""How often all batches in flight are trained before the averaged steps, if a step has many turns: after
once, a step takes as long as later (docs/results/simulator.md). Other simulations wait for twice.
"""
WORK_BATCHES = 16
"""Batches whose responses an estimate averages over."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that could be run, and the bounds of its step time."""

    setting: Setting
    shape: str
    terms: Mapping[str, float]
    estimate_s: float

    @property
    def bound_s(self) -> float:
        """The largest of the bounds."""
        return max(self.terms.values())

    @property
    def limit(self) -> str:
        """The name of the largest bound."""
        return max(self.terms, key=lambda name: self.terms[name])

    def per_group(self, seconds: float) -> float:
        """Return seconds per group: batches differ a little between layouts, so that they divide evenly."""
        return seconds / self.setting.groups


def measured_steps(profile: Profile, groups: int, seed: int) -> int:
    """Return how many steps of this size a simulation averages over."""
    turns = work_of(profile, groups, WORK_BATCHES, seed).turns
    return max(LEAST_STEPS, min(MEASURED_STEPS, int(MEASURED_TURNS // turns)))


def by_estimate(candidate: Candidate) -> tuple[float, int, int]:
    """Sort key: the estimate per group, then the lag, then the number of pools."""
    setting = candidate.setting
    return (
        candidate.per_group(candidate.estimate_s),
        setting.knobs.staleness.max_lag,
        len(setting.placement.pools),
    )


def candidates_of(
    profile: Profile, devices: int, max_lag: int, seed: int, rejections: Rejections | None = None
) -> Iterator[Candidate]:
    """Yield every candidate for these devices, with a lag of at most `max_lag`; note the rejected layouts."""
    rejections = rejections or Rejections()
    strategies = tuple(_strategies(max_lag))
    for shape, roles in shapes(profile).items():
        for pools in _splits(profile, devices, roles):
            layout = rejections.check(profile, pools, devices)
            if layout is None:
                continue

            placement, groups = layout
            work = work_of(profile, groups, WORK_BATCHES, seed)
            measured = measured_steps(profile, groups, seed)
            for knobs in strategies:
                lag = knobs.staleness.max_lag
                around = (FILL_IF_LONG + 1 if measured < MEASURED_STEPS else 3) * (lag + 1)
                steps = around + whole_rounds(measured, lag)
                setting = Setting(
                    profile=profile, placement=placement, knobs=knobs, groups=groups, steps=steps, seed=seed
                )
                terms = bound_terms(setting, work)
                yield Candidate(
                    setting=setting,
                    shape=shape,
                    terms=terms,
                    estimate_s=estimate_s(setting, work, max(terms.values())),
                )


def _strategies(max_lag: int) -> Iterator[AsyncPipelineConfig]:
    """Yield the settings of every strategy with a lag of at most `max_lag`."""
    yield knobs_of("on_policy")
    if max_lag >= 1:
        yield knobs_of("one_step_off")
    for lag in range(2, max_lag + 1):
        yield knobs_of("fully_async", lag)
        yield knobs_of("fully_async", lag, (lag + 1) // 2)


def _splits(
    profile: Profile, devices: int, shape: Sequence[tuple[str, ...]]
) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield possible pool sizes, in whole replicas and nodes.

    Forward-only pools get the devices that their work requires, or a step more or less.
    """
    unit = math.lcm(
        profile.devices_per_replica, 1 if devices <= profile.devices_per_node else profile.devices_per_node
    )
    most = devices // unit

    tried = sorted({max(1, round(i * most / SPLITS)) for i in range(1, SPLITS)})
    for units in tried:
        generate = units * unit
        left = devices - generate
        if left < len(shape):
            continue
        yield from (
            pools_of(dict(zip(shape, sizes, strict=True)), generate)
            for sizes in _dealt(profile, left, shape, unit)
        )


def _dealt(
    profile: Profile, devices: int, shape: Sequence[tuple[str, ...]], unit: int
) -> Iterator[tuple[int, ...]]:
    """Yield the training devices of each pool of a shape."""
    if len(shape) == 1:
        yield (devices,)
        return

    least = 1 if devices <= profile.devices_per_node else min(unit, profile.devices_per_node)
    weights = [_work(profile, roles) for roles in shape]
    even = [weight / sum(weights) * devices for weight in weights]

    seen = set()
    for scale in (0.75, 1.0, 1.5):
        others = [max(least, round(share * scale / least) * least) for share in even[1:]]
        first = devices - sum(others)
        if first >= least and (first, *others) not in seen:
            seen.add((first, *others))
            yield (first, *others)


def _work(profile: Profile, roles: Sequence[str]) -> float:
    """Return the device-seconds per token of a pool's stages."""
    stages = profile.stages
    of_role: dict[str, list[Stage | None]] = {
        "train": [stages.update],
        "logp": [stages.logp],
        "ref_logp": [stages.ref_logp],
        "critic": [stages.values, stages.critic],
    }
    needed = [stage for role in roles for stage in of_role[role] if stage is not None]
    return sum(stage.token_s + stage.device_s * 1e-6 for stage in needed) or 1e-9
