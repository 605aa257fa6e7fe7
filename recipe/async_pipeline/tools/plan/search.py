# SPDX-License-Identifier: Apache-2.0
"""Choose layout, strategy and lag: an estimate ranks candidates, a bound excludes, a simulation decides.

Every candidate has an estimate and a bound of its step time; both cost microseconds. The most promising
candidates are simulated, except those with a bound above the best simulated step. The best few are then
simulated with several seeds, and compared with the best synchronous layout, which has all devices for both
phases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

from ...config.checks.divisibility import check_replicas
from ...config.placement import TEACHER, Pool
from ...errors import ConfigError
from .bound import bound_s, work_of
from .candidates import (
    FILL_IF_LONG,
    MEASURED_STEPS,
    WORK_BATCHES,
    Candidate,
    by_estimate,
    candidates_of,
    check_size,
    measured_steps,
)
from .layout import Rejections, knobs_of, shared_placement
from .profile import Profile
from .simulated.simulation import LEAST_STEPS, SimulatedRun, TooSlow, simulate, whole_rounds
from .simulated.trainer import Setting

DEFAULT_MAX_LAG = 4
SIMULATED, MIN_SIMULATED = 12, 4
"""Candidates that are simulated once: at most, and at least."""
SIMULATED_TURNS = 2_000_000
"""Turns of all simulated candidates together, as long as at least MIN_SIMULATED are simulated."""
FINALISTS = 2
SEEDS = 3
WORTH_IT = 1.05
"""Smallest speed-up for the verdict async: lag has a price."""
AS_GOOD = 0.02
"""Among candidates this close, the one with the least lag and the fewest pools wins."""
T_95: Mapping[int, float] = {
    2: 12.706,
    3: 4.303,
    4: 3.182,
    5: 2.776,
    6: 2.571,
    7: 2.447,
    8: 2.365,
    9: 2.306,
    10: 2.262,
}
"""Student's t for 95 %, two-sided, by the number of values."""


@dataclass(frozen=True, kw_only=True)
class SimulatedCandidate:
    """A candidate and its simulations."""

    candidate: Candidate
    outcomes: Sequence[SimulatedRun]
    sync: Sequence[SimulatedRun]
    """The synchronous layout with the same batches and seeds."""

    @property
    def step_s(self) -> float:
        """Mean step time over the seeds, in seconds."""
        return fmean(o.step_s for o in self.outcomes)

    @property
    def bound_s(self) -> float:
        """Mean bound of the simulated responses; the candidate's bound is of fewer responses."""
        return fmean(bound_s(o.setting) for o in self.outcomes)

    @property
    def sync_step_s(self) -> float:
        """Mean step time of the synchronous layout, in seconds."""
        return fmean(o.step_s for o in self.sync)

    @property
    def speedups(self) -> list[float]:
        """Speed-up over the synchronous layout, seed by seed."""
        return [sync.step_s / mine.step_s for mine, sync in zip(self.outcomes, self.sync, strict=True)]

    @property
    def speedup(self) -> float:
        """Mean speed-up over the synchronous layout."""
        return fmean(self.speedups)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the speed-up, over seeds."""
        found = self.speedups
        if len(found) < 2:
            return found[0], found[0]
        half = T_95[len(found)] * stdev(found) / math.sqrt(len(found))
        return self.speedup - half, self.speedup + half


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search."""

    found: Sequence[SimulatedCandidate]
    """Asynchronous layouts, the best first."""
    verdict: Literal["async", "sync"]
    why: str
    considered: int
    ruled_out: int
    """Candidates ruled out by their bounds."""
    simulated: int


def plan(
    profile: Profile,
    devices: int,
    *,
    max_lag: int = DEFAULT_MAX_LAG,
    seeds: int = SEEDS,
    seed: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """Search for the best plan; `say` receives progress, and an empty text at the end.

    Raises ConfigError if no layout fits the devices, or there are too many of them to search.
    """
    replica, node = profile.devices_per_replica, profile.devices_per_node
    if replica > node:
        several = Pool("generate", ("generate",), (node,) * -(-replica // node))
        check_replicas(several, replica, "devices_per_replica of the profile")
    check_size(profile, devices, max_lag, seed)
    rejections = Rejections()
    candidates = sorted(candidates_of(profile, devices, max_lag, seed, rejections), key=by_estimate)
    if not candidates:
        if rejections.tried:
            raise ConfigError(f"--devices {devices}: {rejections.describe()}")
        raise ConfigError(
            f"--devices {devices}: no split into training and whole replicas of "
            f"{replica} devices, on nodes of {node}, leaves devices for both; use more devices"
        )

    outcomes = Outcomes()
    best: list[tuple[float, Candidate]] = []
    ruled_out = 0
    say(f"{len(candidates)} candidates for {devices} devices")
    for candidate in candidates:
        reached = min((seconds for seconds, _ in best), default=math.inf)
        if candidate.per_group(candidate.bound_s) >= reached:
            ruled_out += 1
        elif len(best) < _affordable(candidate.setting):
            say(f"simulating candidate {len(best) + 1} of at most {_affordable(candidate.setting)}")
            best.append((outcomes.first_s(candidate, reached * (1 + AS_GOOD)), candidate))

    finalists = _finalists(best, outcomes)
    found = []
    # Seed by seed, because all layouts share the responses of a seed, which are kept for a while.
    for i in range(seeds):
        say(f"simulating {len(finalists)} finalists and their synchronous layout, seed {i + 1} of {seeds}")
        found = [_with_seeds(candidate, i + 1, outcomes) for candidate in finalists]
    say("")

    found = sorted(found, key=lambda f: f.candidate.per_group(f.step_s))
    found = _prefer_less_lag(found)
    verdict, why = judge(found[0], max_lag)
    return SearchResult(
        found=tuple(found),
        verdict=verdict,
        why=why,
        considered=len(candidates),
        ruled_out=ruled_out,
        simulated=len(best),
    )


def synchronous(setting: Setting) -> Setting:
    """Return the setting with the same batches on all devices, which train and generate in turn."""
    placement = shared_placement(setting.profile, setting.placement.devices)
    measured = _measured(setting)
    steps = measured + 1 if _is_long(setting) else max(2 * measured, LEAST_STEPS + 3)
    return replace(setting, placement=placement, knobs=knobs_of("on_policy"), steps=steps)


def overrides(found: SimulatedCandidate) -> list[str]:
    """Return the hydra overrides of this plan, to be added to the user's training command."""
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
        f"actor_rollout_ref.actor.ppo_mini_batch_size={setting.groups}",
    ]
    if knobs.strategy in ("n_step_ahead", "fully_async"):
        lines.append(f"++{own}.staleness.max_lag={knobs.staleness.max_lag}")
    if setting.old_logp == "rollout":
        lines.append(f"++{own}.training.old_logp=rollout")
    if setting.profile.stages.ref_logp is not None:
        lines.append("actor_rollout_ref.actor.use_kl_loss=True")
    if setting.profile.stages.critic is not None:
        lines.append("algorithm.adv_estimator=gae")
    if knobs.staleness.depth is not None:
        lines.append(f"++{own}.staleness.depth={knobs.staleness.depth}")

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


def judge(best: SimulatedCandidate, max_lag: int) -> tuple[Literal["async", "sync"], str]:
    """Return the verdict and its reason. `max_lag`: the lag that the plan was allowed."""
    low, high = best.interval
    sync, setting = best.sync[0], best.candidate.setting
    generate_share = _generating(sync)
    result = f"{best.speedup:.2f} x [{low:.2f} .. {high:.2f}] the best synchronous layout"

    if best.speedup >= WORTH_IT and low > 1:
        return "async", (
            f"{result}: generation takes {generate_share:.0%} of its {sync.step_s:.4g} s per step, and the "
            f"pipeline overlaps it; the limit is {limit_in_words(best.candidate.limit)}"
        )
    if best.speedup >= WORTH_IT:
        reason = "but the seeds differ too much to be certain; use more seeds (--seeds)"
    elif not max_lag:
        reason = (
            "with max_lag 0 a batch is generated only after the previous one is trained, so nothing "
            "overlaps; allow some lag"
        )
    elif generate_share < 0.5:
        reason = (
            f"generation takes {generate_share:.0%} of a synchronous step, so its devices would be idle or "
            "training would have too few"
        )
    else:
        reason = "a synchronous step keeps its devices busy, so there is little to overlap"
    return "sync", (
        f"asynchrony does not pay: at best {result} with max_lag {setting.knobs.staleness.max_lag}; {reason}"
    )


LIMITS = {
    "loop": "the slowest response of each batch, which must finish within max_lag",
    "littles": "the number of batches in flight",
    "generate": "the engines' devices",
    "train": "the training devices",
    TEACHER: "the teacher's devices, teacher.devices of the profile",
}
"""The text for each bound, except for the bounds of other pools."""


def limit_in_words(name: str) -> str:
    """Return what a bound is about."""
    return LIMITS.get(name, f"the devices of pool {name}")


def _generating(sync: SimulatedRun) -> float:
    """Return the share of a synchronous run in which its devices generate."""
    shares = sync.accounting.pools["all"].shares()
    return sum(
        share for reason, share in shares.items() if reason in ("compute_generate", "wait_environment")
    )


class Outcomes:
    """The simulations of a search, each made once.

    Finalists often have the same synchronous layout, and were simulated as candidates.
    """

    def __init__(self) -> None:
        self._known: dict[Setting, SimulatedRun] = {}

    def of(self, setting: Setting, slowest_s: float = math.inf) -> SimulatedRun:
        """Return the outcome of a setting.

        Raises TooSlow if its step is known to take more than `slowest_s`, so that nothing depends on it.
        """
        if setting not in self._known:
            self._known[setting] = simulate(setting, _window_if_long(setting), slowest_s)
        return self._known[setting]

    def first_s(self, candidate: Candidate, limit_s: float = math.inf) -> float:
        """Return the seconds per group of a candidate's first simulation.

        Returns infinity for a long simulation that was given up because it takes more than `limit_s`.
        """
        setting = candidate.setting
        slowest_s = limit_s * setting.groups if _is_long(setting) else math.inf
        try:
            return candidate.per_group(self.of(setting, slowest_s).step_s)
        except TooSlow:
            return math.inf


def _finalists(best: Sequence[tuple[float, Candidate]], outcomes: Outcomes) -> list[Candidate]:
    """Return the best few, and the best with batches in prompt order, which is easier to reason about.

    Where a simulation is long, candidates slower than the best with the same responses are left out.
    """
    ordered = sorted(best, key=lambda pair: pair[0])
    first_s, first = ordered[0]
    limit_s = first_s * (1 + AS_GOOD) if _is_long(first.setting) else math.inf
    finalists = [candidate for seconds, candidate in ordered[:FINALISTS] if seconds <= limit_s]

    if first.setting.knobs.strategy == "fully_async":
        knobs = replace(first.setting.knobs, strategy="n_step_ahead")
        in_order = replace(first, setting=replace(first.setting, knobs=knobs))
        if limit_s == math.inf or outcomes.first_s(in_order, limit_s) <= limit_s:
            finalists.append(in_order)
    return finalists


def _with_seeds(candidate: Candidate, seeds: int, outcomes: Outcomes) -> SimulatedCandidate:
    """Simulate a finalist with every seed, for more steps than before unless that takes too long."""
    setting = candidate.setting
    if not _is_long(setting):
        more = whole_rounds(MEASURED_STEPS, setting.knobs.staleness.max_lag)
        setting = replace(setting, steps=setting.steps + more)
    settings = [replace(setting, seed=setting.seed + i) for i in range(seeds)]
    return SimulatedCandidate(
        candidate=candidate,
        outcomes=tuple(outcomes.of(setting) for setting in settings),
        sync=tuple(outcomes.of(synchronous(setting)) for setting in settings),
    )


def _measured(setting: Setting) -> int:
    return measured_steps(setting.profile, setting.groups, setting.seed)


def _is_long(setting: Setting) -> bool:
    """Return whether a simulation has so many turns that it averages over fewer steps than others."""
    return _measured(setting) < MEASURED_STEPS


def _window_if_long(setting: Setting) -> tuple[int, int] | None:
    """Return a window with fewer steps around it where steps have many turns, or None for the usual one.

    The pipeline fills once instead of twice. Without lag nothing fills: all steps but the first are alike.
    """
    if not _is_long(setting):
        return None
    if setting.shared:
        return 1, setting.steps
    batches = setting.knobs.staleness.max_lag + 1
    return FILL_IF_LONG * batches, setting.steps - batches


def _affordable(setting: Setting) -> int:
    """Return how many candidates of this size may be simulated."""
    if _is_long(setting):
        return MIN_SIMULATED
    turns = setting.steps * work_of(setting.profile, setting.groups, WORK_BATCHES, setting.seed).turns
    return max(MIN_SIMULATED, min(SIMULATED, int(SIMULATED_TURNS // turns)))


def _prefer_less_lag(found: list[SimulatedCandidate]) -> list[SimulatedCandidate]:
    """Move the candidate with the least lag and the fewest pools to the front, among the equally good."""
    limit = found[0].candidate.per_group(found[0].step_s) * (1 + AS_GOOD)
    as_good = [f for f in found if f.candidate.per_group(f.step_s) <= limit]
    first = min(
        as_good,
        key=lambda f: (f.candidate.setting.knobs.staleness.max_lag, len(f.candidate.setting.placement.pools)),
    )
    return [first, *(f for f in found if f is not first)]
