# SPDX-License-Identifier: Apache-2.0
"""Which layout, strategy and lag: an estimate orders the candidates, a bound rules out, a simulation decides.

Every candidate has an estimate and a bound of its step time; both cost microseconds. The most promising are
simulated, a
candidate whose bound is worse than the best simulated step never. The best few are then simulated with
several seeds,
and compared with the best synchronous layout, which gets all devices for both phases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean, stdev
from typing import Any, Literal

from ..config.schema import AsyncPipelineConfig
from ..errors import ConfigError
from .bound import bound_s, bound_terms, estimate_s, work_of
from .layout import groups_of, knobs_of, placement_of, pools_of, shapes, shared_placement
from .profile import Profile, Stage
from .simulation import LEAST_STEPS, Outcome, simulate
from .trainer import Setting

DEFAULT_MAX_LAG = 4
SPLITS = 24
"""Sizes of the rollout's pool that are tried, evenly over all devices."""
SIMULATED, LEAST_SIMULATED = 12, 4
"""Candidates that are simulated, once each: at most, and on clusters of whatever size."""
SIMULATED_ANSWERS = 2_000_000
"""Of all those candidates together, if it does not take fewer than the least."""
FINALISTS = 2
SEEDS = 3
MEASURED_STEPS = 12
"""Of a simulation; twice as many of a finalist's."""
WORK_BATCHES = 16
"""Batches whose answers an estimate is made of."""
WORTH_IT = 1.05
"""Below this speed-up a plan says sync, and where it is not certain that there is any: lag is no gift."""
AS_GOOD = 0.02
"""Of candidates that are so close the least lag wins, and the fewest pools."""
T_95: Mapping[int, float] = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""Student's t for 95 %, two sides, by the number of values."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that could be run, and what no schedule of it could beat."""

    setting: Setting
    shape: str
    terms: Mapping[str, float]
    estimate_s: float

    @property
    def bound_s(self) -> float:
        return max(self.terms.values())

    @property
    def limit(self) -> str:
        """The constraint that binds."""
        return max(self.terms, key=lambda name: self.terms[name])

    def per_group(self, seconds: float) -> float:
        """Batches differ a little between layouts, so that they can be dealt out."""
        return seconds / self.setting.groups


@dataclass(frozen=True, kw_only=True)
class Found:
    """A candidate after its simulations."""

    candidate: Candidate
    outcomes: Sequence[Outcome]
    sync: Sequence[Outcome]
    """The synchronous layout with the same batches and seeds."""

    @property
    def step_s(self) -> float:
        return fmean(o.step_s for o in self.outcomes)

    @property
    def bound_s(self) -> float:
        """Of the very answers that were simulated; the candidate's own is of fewer."""
        return fmean(bound_s(o.setting) for o in self.outcomes)

    @property
    def sync_step_s(self) -> float:
        return fmean(o.step_s for o in self.sync)

    @property
    def speedups(self) -> list[float]:
        """Over the synchronous layout, seed by seed."""
        return [sync.step_s / mine.step_s for mine, sync in zip(self.outcomes, self.sync, strict=True)]

    @property
    def speedup(self) -> float:
        return fmean(self.speedups)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the speed-up, over seeds."""
        found = self.speedups
        if len(found) < 2:
            return found[0], found[0]
        half = T_95[len(found)] * stdev(found) / math.sqrt(len(found))
        return self.speedup - half, self.speedup + half


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is worth doing."""

    found: Sequence[Found]
    """The best first, asynchronous all."""
    verdict: Literal["async", "sync"]
    why: str
    considered: int
    ruled_out: int
    """By their bounds."""
    simulated: int


def plan(
    profile: Profile,
    devices: int,
    *,
    max_lag: int = DEFAULT_MAX_LAG,
    seeds: int = SEEDS,
    seed: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Search; `say` is told how far it is, and an empty text at the end. Raises ConfigError: no layout
    fits these devices.
    """
    candidates = sorted(_candidates(profile, devices, max_lag, seed), key=_by_estimate)
    if not candidates:
        raise ConfigError(
            f"--devices {devices}: no split into training and whole replicas of "
            f"{profile.devices_per_replica} devices deals out "
            f"{profile.batch.on(devices)} x {profile.batch.answers} samples evenly; take another number of "
            "devices, or another batch"
        )
    best: list[tuple[float, Candidate]] = []
    ruled_out = 0
    for candidate in candidates:
        reached = min((seconds for seconds, _ in best), default=math.inf)
        if candidate.per_group(candidate.bound_s) >= reached:
            ruled_out += 1
        elif len(best) < _affordable(candidate.setting):
            say(
                f"{len(candidates)} candidates, simulating number {len(best) + 1} of at most "
                f"{_affordable(candidate.setting)}"
            )
            best.append((candidate.per_group(simulate(candidate.setting).step_s), candidate))
    found = []
    for number, candidate in enumerate(finalists := _finalists(best), start=1):
        say(f"finalist {number} of {len(finalists)}, with {seeds} seeds")
        found.append(_with_seeds(candidate, seeds))
    say("")
    found = sorted(found, key=lambda f: f.candidate.per_group(f.step_s))
    found = _prefer_less_lag(found)
    verdict, why = judge(found[0], max_lag)
    return Plan(
        found=tuple(found),
        verdict=verdict,
        why=why,
        considered=len(candidates),
        ruled_out=ruled_out,
        simulated=len(best),
    )


def synchronous(setting: Setting) -> Setting:
    """The same batches on all devices of the cluster, which train and generate in turn."""
    placement = shared_placement(setting.profile, setting.placement.devices)
    return replace(setting, placement=placement, knobs=knobs_of("on_policy"), steps=2 * MEASURED_STEPS)


def overrides(found: Found) -> list[str]:
    """Hydra overrides of this plan; those that say how many devices there are come from the user's own
    command.
    """
    knobs, setting = found.candidate.setting.knobs, found.candidate.setting
    pools = ",".join(
        f"{pool.name}:{{roles:[{','.join(pool.roles)}],devices:{pool.devices}}}"
        for pool in setting.placement.pools
    )
    own = "trainer.v1.async_pipeline"
    lines = [
        "+async_pipeline=True",
        f"+async_strategy={knobs.strategy}",
        f"data.train_batch_size={setting.groups}",
    ]
    if knobs.strategy in ("n_step_ahead", "fully_async"):
        lines.append(f"++{own}.max_lag={knobs.max_lag}")
    if setting.profile.stages.ref_logp is not None:
        lines.append("actor_rollout_ref.actor.use_kl_loss=True")
    if setting.profile.stages.critic is not None:
        lines.append("algorithm.adv_estimator=gae")
    if knobs.depth is not None:
        lines.append(f"++{own}.depth={knobs.depth}")
    node = setting.profile.devices_per_node
    nodes = -(-setting.placement.devices // node)
    sizes = [
        f"trainer.nnodes={nodes}",
        f"trainer.n_gpus_per_node={min(node, setting.placement.devices)}",
        "actor_rollout_ref.rollout.nnodes=0",
        f"actor_rollout_ref.rollout.n={setting.profile.batch.answers}",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={setting.profile.devices_per_replica}",
    ]
    return [*lines, *sizes, f"++{own}.pools={{{pools}}}"]


def judge(best: Found, max_lag: int) -> tuple[Literal["async", "sync"], str]:
    """Is it worth while, and why. `max_lag`: that the plan was allowed."""
    low, high = best.interval
    sync, setting = best.sync[0], best.candidate.setting
    generate_share = _generating(sync)
    told = f"{best.speedup:.2f} x [{low:.2f} .. {high:.2f}] the best synchronous layout"
    if best.speedup >= WORTH_IT and low > 1:
        return "async", (
            f"{told}: of its {sync.step_s:.4g} s a step {generate_share:.0%} goes by in generation, which "
            "the pipeline overlaps; "
            f"what limits it then is {_LIMITS.get(best.candidate.limit, best.candidate.limit)}"
        )
    if best.speedup >= WORTH_IT:
        reason = "but the seeds differ too much to be sure; try more of them (--seeds)"
    elif not max_lag:
        reason = (
            "with max_lag 0 a batch is generated only when the one before it is trained, so that "
            "nothing overlaps; allow some lag"
        )
    elif generate_share < 0.5:
        reason = (
            f"generation is {generate_share:.0%} of a synchronous step, so that its devices would "
            "stand still or training would have too few"
        )
    else:
        reason = "a synchronous step keeps its devices busy, so that there is little to overlap"
    return "sync", f"asynchrony will not pay: at best {told} with max_lag {setting.knobs.max_lag}; {reason}"


_LIMITS = {
    "loop": "the slowest answer of each batch, which must come back within max_lag",
    "littles": "how many batches may be in flight",
    "generate": "the engines' devices",
    "train": "the training devices",
}


def _generating(sync: Outcome) -> float:
    """Share of a synchronous run in which its devices generate."""
    shares = sync.accounting.pools["all"].shares()
    return sum(
        share for reason, share in shares.items() if reason in ("compute_generate", "wait_environment")
    )


def _by_estimate(candidate: Candidate) -> tuple[float, int, int]:
    setting = candidate.setting
    return candidate.per_group(candidate.estimate_s), setting.knobs.max_lag, len(setting.placement.pools)


def _candidates(profile: Profile, devices: int, max_lag: int, seed: int) -> Iterator[Candidate]:
    for shape, roles in shapes(profile).items():
        for pools in _splits(profile, devices, roles):
            try:
                placement = placement_of(profile, pools, devices)
                groups = groups_of(profile, placement)
            except ConfigError:
                continue
            for knobs in _strategies(max_lag):
                steps = 3 * (knobs.max_lag + 1) + max(LEAST_STEPS, MEASURED_STEPS)
                setting = Setting(
                    profile=profile, placement=placement, knobs=knobs, groups=groups, steps=steps, seed=seed
                )
                work = work_of(profile, groups, WORK_BATCHES, seed)
                yield Candidate(
                    setting=setting,
                    shape=shape,
                    terms=bound_terms(setting, work),
                    estimate_s=estimate_s(setting, work),
                )


def _strategies(max_lag: int) -> Iterator[AsyncPipelineConfig]:
    yield knobs_of("on_policy")
    if max_lag >= 1:
        yield knobs_of("one_step_off")
    for lag in range(2, max_lag + 1):
        yield knobs_of("fully_async", lag)
        yield knobs_of("fully_async", lag, (lag + 1) // 2)


def _splits(
    profile: Profile, devices: int, shape: Sequence[tuple[str, ...]]
) -> Iterator[dict[str, dict[str, Any]]]:
    """Sizes that can be: replicas and nodes are whole. Forward-only pools get what their work asks for, or
    a step more or less.
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
    """Training devices for each pool of a shape."""
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
    """Device-seconds of a token, of the stages of a pool."""
    stages = profile.stages
    of_role: dict[str, list[Stage | None]] = {
        "train": [stages.update],
        "logp": [stages.logp],
        "ref_logp": [stages.ref_logp],
        "critic": [stages.values, stages.critic],
    }
    needed = [stage for role in roles for stage in of_role[role] if stage is not None]
    return sum(stage.token_s + stage.device_s * 1e-6 for stage in needed) or 1e-9


def _finalists(best: Sequence[tuple[float, Candidate]]) -> list[Candidate]:
    """The best few; and the best again with batches in the order of their prompts, which is easier to
    reason about.
    """
    ordered = [candidate for _, candidate in sorted(best, key=lambda pair: pair[0])]
    knobs = ordered[0].setting.knobs
    in_order = [
        replace(
            ordered[0], setting=replace(ordered[0].setting, knobs=replace(knobs, strategy="n_step_ahead"))
        )
        for _ in range(knobs.strategy == "fully_async")
    ]
    return [*ordered[:FINALISTS], *in_order]


def _with_seeds(candidate: Candidate, seeds: int) -> Found:
    setting = replace(candidate.setting, steps=candidate.setting.steps + MEASURED_STEPS)
    settings = [replace(setting, seed=setting.seed + i) for i in range(seeds)]
    return Found(
        candidate=candidate,
        outcomes=tuple(simulate(setting) for setting in settings),
        sync=tuple(_simulated_once(synchronous(setting)) for setting in settings),
    )


@lru_cache(maxsize=64)
def _simulated_once(setting: Setting) -> Outcome:
    """Finalists often have the same batches, and then the same synchronous layout beside them."""
    return simulate(setting)


def _affordable(setting: Setting) -> int:
    """Candidates like this one that may be simulated."""
    answers = setting.groups * setting.profile.batch.answers * setting.steps
    return max(LEAST_SIMULATED, min(SIMULATED, SIMULATED_ANSWERS // answers))


def _prefer_less_lag(found: list[Found]) -> list[Found]:
    """The best first; of those as good as it, the one with the least lag and the fewest pools."""
    limit = found[0].candidate.per_group(found[0].step_s) * (1 + AS_GOOD)
    as_good = [f for f in found if f.candidate.per_group(f.step_s) <= limit]
    first = min(
        as_good, key=lambda f: (f.candidate.setting.knobs.max_lag, len(f.candidate.setting.placement.pools))
    )
    return [first, *(f for f in found if f is not first)]
