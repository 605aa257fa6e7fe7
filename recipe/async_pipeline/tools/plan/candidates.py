# SPDX-License-Identifier: Apache-2.0
"""The layouts, strategies and lags that a search considers, each with an estimate and bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...config.knobs.schema import AsyncPipelineConfig
from ...errors import ConfigError
from .bound import bound_terms, estimate_s, work_of
from .layout import Rejections, fits, knobs_of, largest_size, pools_of, rollout_unit, shapes
from .profile import Profile, Stage
from .simulated.draws import Draws
from .simulated.simulation import LEAST_STEPS, whole_rounds
from .simulated.trainer import Setting

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
MOST_DEVICES = 65_536
"""Largest number of devices, because the time of a search grows with nodes and replicas, too."""
MOST_TURNS = 4_000_000
"""Largest number of turns in a simulation, of which a search makes a dozen and more: about 20 us each."""
WORK_BATCHES = 16
"""Batches whose responses an estimate averages over."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that could be run, and the bounds of its step time."""

    setting: Setting
    shape: str
    terms: Mapping[str, float]
    estimate_s: float
    idle: int = 0
    """Devices in no pool."""

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
    return _averaged(work_of(profile, groups, WORK_BATCHES, seed).turns)


def _averaged(turns: float) -> int:
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
                steps = _steps(measured, knobs.staleness.max_lag)
                setting = Setting(
                    profile=profile, placement=placement, knobs=knobs, groups=groups, steps=steps, seed=seed
                )
                terms = bound_terms(setting, work)
                yield Candidate(
                    setting=setting,
                    shape=shape,
                    terms=terms,
                    estimate_s=estimate_s(setting, work, max(terms.values())),
                    idle=devices - placement.devices,
                )


def check_size(profile: Profile, devices: int, max_lag: int, seed: int) -> None:
    """Raises ConfigError if simulations would take too long."""
    turns_of_group = float(Draws(profile, seed).chunk(0).turns.sum(axis=1).mean())
    turns = profile.batch.on(devices) * turns_of_group
    steps = _steps(_averaged(turns), max_lag)
    if turns * steps > MOST_TURNS:
        raise ConfigError(
            f"--devices {devices}: a simulation would have {turns * steps:.0f} turns of responses, {steps} "
            f"steps (max_lag {max_lag}) of {turns:.0f}, but at most {MOST_TURNS} are simulated; use "
            "fewer devices, a smaller batch in the profile, or a lower --max-lag"
        )


def _steps(measured: int, lag: int) -> int:
    """Return the steps of a simulation that averages over about `measured`."""
    around = (FILL_IF_LONG + 1 if measured < MEASURED_STEPS else 3) * (lag + 1)
    return around + whole_rounds(measured, lag)


FINE_LAGS = 32
"""Up to this lag each one is tried; beyond it, in steps of an eighth."""


def _strategies(max_lag: int) -> Iterator[AsyncPipelineConfig]:
    """Yield the settings of every strategy with a lag of at most `max_lag`."""
    yield knobs_of("on_policy")
    if max_lag >= 1:
        yield knobs_of("one_step_off")
    lag = 2
    while lag <= max_lag:
        yield knobs_of("fully_async", lag)
        yield knobs_of("fully_async", lag, (lag + 1) // 2)
        lag += 1 if lag < FINE_LAGS else lag // 8


def _splits(
    profile: Profile, devices: int, shape: Sequence[tuple[str, ...]]
) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield possible pool sizes, in whole replicas and nodes.

    Forward-only pools get the devices that their work requires, or a step more or less. Sizes that a run
    refuses are reduced, and the devices that this frees go to the other pools as far as possible.
    """
    seen = []
    for generate, unit in _rollouts(profile, devices):
        left = devices - generate
        if left < len(shape):
            continue
        for dealt in _dealt(profile, left, shape, unit):
            pools = _filled(profile, devices, dict(zip(shape, dealt, strict=True)), generate)
            if pools not in seen:
                seen.append(pools)
                yield pools


def _rollouts(profile: Profile, devices: int) -> Iterator[tuple[int, int]]:
    """Yield sizes of the rollout's pool and their units, evenly spaced.

    Where nodes are not full or replicas do not fill them, the pool may also share a node with training.
    """
    replica, node = profile.devices_per_replica, profile.devices_per_node
    whole = rollout_unit(profile, devices)
    within = devices > node >= replica and (devices % node > 0 or node % replica > 0)
    sizes = {
        max(1, round(i * (most // unit) / SPLITS)) * unit: unit
        for unit, most in ((replica, node), (whole, devices))
        for i in range(1, SPLITS)
        if unit == whole or within
    }
    yield from sorted(sizes.items())


def _dealt(
    profile: Profile, devices: int, shape: Sequence[tuple[str, ...]], unit: int
) -> Iterator[tuple[int, ...]]:
    """Yield the training devices of each pool of a shape."""
    if len(shape) == 1:
        yield (devices,)
        return

    node = profile.devices_per_node
    least = 1 if devices <= node else min(unit, node)
    weights = [_work(profile, roles) for roles in shape]
    even = [weight / sum(weights) * devices for weight in weights]

    def others(scale: float) -> list[int]:
        return [max(least, round(share * scale / least) * least) for share in even[1:]]

    deals = [others(scale) for scale in (0.75, 1.0, 1.5)]
    if devices > node and (rest := devices % node):
        # The first pool takes whole nodes; the node that is not full can be another pool's.
        deals += [[*others(1.0)[:i], rest, *others(1.0)[i + 1 :]] for i in range(len(shape) - 1)]
    seen = set()
    for deal in deals:
        first = devices - sum(deal)
        if first >= least and (first, *deal) not in seen:
            seen.add((first, *deal))
            yield (first, *deal)


def _filled(
    profile: Profile, devices: int, dealt: Mapping[tuple[str, ...], int], generate: int
) -> dict[str, dict[str, Any]]:
    """Return pools of sizes that a run accepts: smaller than dealt if need be, then as large as the rest
    permits, the rollout's first and the trainer's last.

    A size stays if a run accepts only much less, so that its rejection has the reason.
    """
    node = profile.devices_per_node
    sizes = {
        roles: largest_size(profile, devices, roles[0], size, (min(size, node) - 1) // 2) or size
        for roles, size in dealt.items()
    }
    # One pool may only fit after another has grown.
    for roles in (None, *reversed(sizes)) * len(sizes):
        spare = devices - generate - sum(sizes.values())
        if not spare:
            break
        now = generate if roles is None else sizes[roles]
        size = now + spare
        while size := largest_size(profile, devices, "generate" if roles is None else roles[0], size, now):
            grown = (sizes, size) if roles is None else ({**sizes, roles: size}, generate)
            if fits(profile, pools_of(*grown), devices):
                sizes, generate = grown
                break
            size -= 1
    return pools_of(sizes, generate)


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
