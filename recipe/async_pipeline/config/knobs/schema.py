# SPDX-License-Identifier: Apache-2.0
"""The knobs of the pipeline, each with its type, default and bounds.

The docstring below a field is its only documentation: `reference` renders it into
`configs/async_pipeline.yaml`, `docs/configuration.md` and `async-pipeline explain --knobs`.

Pure: takes plain values, imports neither verl nor ray. Error messages have one line: path, rule, value,
remedy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from ...core.groups.bad_data import Policies, is_finite
from ...core.groups.untrained_groups import Straggler
from ...errors import ConfigError
from ...strategies import STRATEGIES
from ..paths import OWN, hint
from .agentic import AgenticConfig
from .diffusion import DiffusionConfig
from .fields import Bounds, Limit, Positive, Seconds, build, check_fields, flattened, knobs_of
from .weight_sync import WeightSyncConfig

MOST_NOTICE_S = 600.0
"""`watch` gives a run that got SIGTERM so many seconds more."""

STRATEGY_LAG: Mapping[str, int | None] = {name: s.implied_lag for name, s in STRATEGIES.items()}
"""The `max_lag` that each strategy implies, or None if the user chooses it."""
STRATEGY_ALIASES = {"naive": "on_policy"}
DEFAULT_STRATEGY = "one_step_off"
DEFAULT_AHEAD = 3
"""max_lag of n_step_ahead and fully_async if no key sets it."""
MOST_LAG = 1000
"""Each version of lag is a batch in flight, so a typing error must not create millions."""

OldLogp = Literal["auto", "update", "trainer", "rollout", "logp_pool"]


@dataclass(frozen=True, kw_only=True)
class StalenessConfig:
    """How old a trajectory may be when it is trained, and what happens to one that would be too old."""

    PATH: ClassVar[str] = f"{OWN}.staleness"

    max_lag: Annotated[int, Bounds(least=0, most=MOST_LAG, remedy="use 0 for on-policy")] = 1
    """Hard bound: how many policy versions a trajectory may be older than the trainer that uses it. on_policy
    implies 0 and one_step_off implies 1. Default: the strategy's; 3 for n_step_ahead and fully_async."""
    depth: int | None = None
    """Batches that may be in flight or waiting in addition to the one that trains. With less than max_lag,
    responses are younger on average, and slow ones may still take until max_lag. Default: max_lag."""
    ess_floor: float | None = None
    """Smallest effective sample size of a step, as a share: while the importance weights of what is trained
    have a smaller one, fewer batches are generated ahead, and more again when it stays above. A step
    without lag has a share near 1. Default: none, the lag does not follow it."""
    oldest_share: float = 1.0
    """Share of each batch that may have the full max_lag; the rest is at least one version younger. With
    max_lag 2, a share of 0.5 is ROLL's async_generation_ratio 1.5."""
    straggler: Straggler = "wait"
    """What happens to an unfinished group that holds up a step while enough others are finished: the step
    waits for it (wait), it is generated again with newer weights (regenerate), it is given up (drop), or it
    continues and is trained later, with the tokens masked that are older than max_lag by then (mask).
    Regenerate and drop favour short responses; async_pipeline/bias/* measures by how much."""

    def __post_init__(self) -> None:
        check_fields(self, self.PATH)
        if self.depth is not None and not 0 <= self.depth <= self.max_lag:
            raise ConfigError(
                f"{self.PATH}.depth must be from 0 to max_lag, {self.max_lag}, got {self.depth}; leave it "
                "out for max_lag"
            )
        if (floor := self.ess_floor) is not None and not 0 < floor < 1:
            raise ConfigError(
                f"{self.PATH}.ess_floor must be above 0 and below 1, got {floor}; leave it out for none"
            )
        if floor is not None and not self.batches_ahead:
            raise ConfigError(
                f"{self.PATH}.ess_floor must be null without batches ahead, got {floor}; leave it out, or "
                "raise max_lag and depth"
            )
        if not 0 < self.oldest_share <= 1:
            raise ConfigError(
                f"{self.PATH}.oldest_share must be above 0 and at most 1, got {self.oldest_share}; 1 is the "
                "default"
            )
        if self.straggler == "mask" and self.oldest_share != 1:
            raise ConfigError(
                f"{self.PATH}.oldest_share must be 1 with straggler mask, got {self.oldest_share}; leave it "
                "out, or choose another straggler"
            )
        if self.max_lag == 0 and self.oldest_share != 1:
            raise ConfigError(
                f"{self.PATH}.oldest_share must be 1 with max_lag 0, got {self.oldest_share}; leave it out, "
                "or raise max_lag"
            )

    @property
    def batches_ahead(self) -> int:
        """`depth`, or its default."""
        return self.max_lag if self.depth is None else self.depth


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What a training step computes."""

    PATH: ClassVar[str] = f"{OWN}.training"
    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("old_logp",)

    old_logp: OldLogp = "auto"
    """The policy whose log-probs are PPO's old log-probs. In step s: trainer (version s-1, as in a sequential
    run), update (the same, by the forward pass of the update, which must be the only one of the step),
    rollout (the log-probs that the engine recorded during generation; nothing is computed), or logp_pool
    (version s-2, computed while step s-1 trains; requires a pool for logp). auto: logp_pool where logp has
    its own pool and max_lag is above 0, else update where nothing needs an earlier pass (explain says what),
    else trainer."""
    ref_refresh_every: Annotated[int, Bounds(least=0, remedy="0 is never")] = 0
    """Optimizer steps after which the trained policy replaces the reference policy; 0 is never. With a pool
    for ref_logp, the newest reference is also saved in the run directory."""

    def __post_init__(self) -> None:
        check_fields(self, self.PATH)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How requests reach the rollout replicas."""

    PATH: ClassVar[str] = f"{OWN}.rollout"

    max_open_requests: Limit | None = None
    """Requests that may be open on one replica; the others wait in the agent loop workers, where they can
    still go to another replica or be recalled. Each of the actor_rollout_ref.rollout.agent.num_workers has an
    equal share, at least one request. Default: twice actor_rollout_ref.rollout.max_num_seqs (times
    data_parallel_size), or more, so that a whole group fits in each share."""

    def __post_init__(self) -> None:
        check_fields(self, self.PATH)


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """Rollout replicas that join and leave during a run; see `async-pipeline replicas`."""

    PATH: ClassVar[str] = f"{OWN}.fleet"

    max_replicas: Annotated[int, Bounds(least=0, remedy="0 keeps the replicas of the placement")] = 0
    """Replicas up to which the run grows by itself: it starts one wherever a node of the Ray cluster has
    enough free devices, such as a node that joined. 0: only `async-pipeline replicas --add` adds any."""

    def __post_init__(self) -> None:
        check_fields(self, self.PATH)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How responses are scored, and what happens to one that cannot be scored."""

    PATH: ClassVar[str] = f"{OWN}.reward"
    LIMITED: ClassVar[tuple[str, ...]] = ("batch", "attempts", "concurrency", "memory_mb")
    """Knobs that have an effect only with `timeout_s`."""
    # Not `while_generating`: the finished responses of a checkpoint have scores, or are still to get them.
    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("timeout_s", "failure", "default", *LIMITED)

    while_generating: bool = True
    """Score each response as soon as it is finished. False: score the batch once all of it is generated,
    which is slower; use it to measure the difference."""
    timeout_s: Seconds | None = None
    """Seconds that one call of the reward function may take. With a limit, a plain function runs in separate
    processes, which are killed when the time is over, and an async one is cancelled. It requires
    reward.custom_reward_function.path. Default: no limit, no processes."""
    attempts: Limit = 2
    """Calls for one response before it counts as not scored. Requires timeout_s."""
    concurrency: Limit = 8
    """Concurrent calls in each reward worker (reward.num_workers); a plain function gets a process for each.
    Requires timeout_s."""
    batch: Limit | None = None
    """Responses per call, for a function that takes lists (data_sources, solution_strs, ground_truths,
    extra_infos) and returns a list of scores. Requires timeout_s. Default: it takes one response."""
    memory_mb: Limit | None = None
    """MB of address space of each process that calls a plain function. Libraries reserve far more than they
    use (importing torch for CPUs reserves 650 MB). Requires timeout_s. Default: no limit."""
    failure: Literal["fail", "drop", "score"] = "fail"
    """What happens to a response that could not be scored, because the function raised, exceeded a limit, or
    returned None, NaN or infinity: fail (the run ends and says why), drop (its group is not trained), or
    score (it gets the score in `default`)."""
    default: float = 0.0
    """The score of a response that could not be scored, with failure=score."""

    def __post_init__(self) -> None:
        check_fields(self, self.PATH)
        if not is_finite(self.default):
            raise ConfigError(
                f"{self.PATH}.default must be a finite number, got {self.default!r}; 0.0 is the default"
            )
        if self.timeout_s is None:
            for name in self.LIMITED:
                value = getattr(self, name)
                if value != getattr(type(self), name):
                    raise ConfigError(f"{self.PATH}.{name}={value!r} requires {self.PATH}.timeout_s; set it")


@dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """Deadlines, and how the run reacts to failures and bad data."""

    PATH: ClassVar[str] = f"{OWN}.faults"

    wait_timeout_s: Seconds = 1800.0
    """Seconds that a stage may wait for items, room, a lease or a version, or for a call into verl to return,
    before the run fails and diagnosis.txt names the stages that waited for each other. It must exceed the
    duration of any step, load or validation. Checkpoints do not count: see checkpoint_stall_s."""
    checkpoint_stall_s: Seconds = 1800.0
    """Seconds without a byte of progress after which writing a checkpoint has failed, and with it the run.
    While it grows, a checkpoint may take any time, and so may the stages that wait for it."""
    verify_checkpoint_at_start: bool = False
    """Read the whole checkpoint and compare its hashes before anything is started, so that with
    trainer.resume_mode=auto a damaged one is passed over. By default only its manifest and the sizes of its
    files are checked then, and each process checks the files that it loads."""
    notice_s: Annotated[float, Bounds(least=0, most=MOST_NOTICE_S, remedy="0 ends at once")] = 0.0
    """Seconds from SIGTERM to the end of the machine, as schedulers grant them to a job that they preempt:
    the run finishes its step, writes a checkpoint and ends. 0: it ends without a checkpoint, as after
    Ctrl-C. Leave 20 seconds of the scheduler's time for the end of the processes."""
    strict_observers: bool = False
    """Whether an error of something that only observes the run, such as the account of device-seconds, a
    tracker or a metric, ends the run. By default it is reported and switched off, and the run continues;
    the ledger and the checks of lag and conservation always end the run. For tests."""
    bad_data: Policies = Policies()
    max_prompt_attempts: Positive = 2
    """How often a prompt whose group was dropped is generated before it is quarantined: its group then has
    failed, another prompt replaces it, and later epochs skip it."""

    def __post_init__(self) -> None:
        check_fields(self, self.PATH)


@dataclass(frozen=True, kw_only=True)
class AsyncPipelineConfig:
    """The knobs of the pipeline, below `trainer.v1.async_pipeline`."""

    MAY_CHANGE: ClassVar[tuple[str, ...]] = (
        *("run_dir", "pools", "validation", "engine_check"),
        *("rollout", "fleet", "faults"),
    )
    """Knobs and whole sections that a resumed run may have with other values; see `fields`."""

    strategy: str = DEFAULT_STRATEGY
    """on_policy, one_step_off, n_step_ahead, fully_async, or `module:Class` for a custom strategy. The same
    as async_strategy. If only staleness.max_lag is set, the strategy follows from it: 0 is on_policy, 1 is
    one_step_off, more is n_step_ahead. n_step_ahead trains batches in the order in which they were drawn,
    fully_async trains groups in the order in which they finish."""
    run_dir: str | None = None
    """Directory of events.jsonl, metrics.jsonl and summary.json. Default:
    outputs/<trainer.project_name>/<trainer.experiment_name>."""
    pools: Mapping[str, Any] | None = None
    """Which stages compute on which devices: the name of a pool with its stages, and its size in devices or
    as a share of all, e.g. {train: {roles: [train], devices: 4}, generate: {roles: [generate], share: 0.25}}.
    Stages that are not named (logp, ref_logp, critic) share the training devices; see docs/pools.md.
    Default: trainer.{nnodes,n_gpus_per_node} for training and
    actor_rollout_ref.rollout.{nnodes,n_gpus_per_node} for generation."""
    custom_stages: tuple[str, ...] = ()
    """Custom stages to insert, each as `module:Class@after->before`, e.g. "my_module:Audit@reward->train"."""
    validation: Literal["parallel", "pause"] = "parallel"
    """While a version is validated (trainer.test_freq), training continues and the replicas keep that
    version. Prompts for training are generated meanwhile (parallel), or wait until it is over (pause)."""
    engine_check: Literal["refuse", "warn"] = "refuse"
    """What happens if the installed engine lacks something that this package uses, or has changed it, as
    `async-pipeline doctor --engine` reports: the run is refused, or starts with a warning unless verl itself
    cannot start the engine. An engine with the files that this package is tested with is not compared. The
    same happens after the first load if the engine's tables explain less than 90 % of the served weights."""
    staleness: StalenessConfig = StalenessConfig()
    training: TrainingConfig = TrainingConfig()
    rollout: RolloutConfig = RolloutConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    fleet: FleetConfig = FleetConfig()
    reward: RewardConfig = RewardConfig()
    agentic: AgenticConfig = AgenticConfig()
    diffusion: DiffusionConfig = DiffusionConfig()
    faults: FaultsConfig = FaultsConfig()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> AsyncPipelineConfig:
        """Build from plain values, nested or by dotted paths; None means the default. Raises ConfigError."""
        return build(cls, flattened(cls, values))

    def __post_init__(self) -> None:
        for knob in knobs_of(type(self)):
            # Sections check their own knobs.
            if "." not in knob.path and (value := getattr(self, knob.path)) is not None:
                knob.check(value, f"{OWN}.{knob.path}")
        for spec in self.custom_stages:
            if not (spec.count("@") == 1 and spec.count("->") == 1 and ":" in spec.split("@")[0]):
                raise ConfigError(
                    f"{OWN}.custom_stages entries must read module:Class@after->before, got {spec!r}; see "
                    "docs/architecture.md"
                )
        self._check_lag()
        self.agentic.check_timeouts(self.faults.wait_timeout_s)

    def _check_lag(self) -> None:
        staleness, sync = self.staleness, self.weight_sync
        share, depth = staleness.oldest_share, staleness.batches_ahead
        longest = depth + (share == 1)
        if sync.every > longest:
            raise ConfigError(
                f"{sync.PATH}.every must be at most {longest} with a depth of {depth} and oldest_share "
                f"{share:g}, got {sync.every}, since prompts and weights would wait for each other; set "
                f"staleness.max_lag (and staleness.depth) to {sync.every - (share == 1)} or more"
            )
        implied = STRATEGY_LAG.get(self.strategy)
        if implied is not None and implied != staleness.max_lag:
            raise ConfigError(
                f"{staleness.PATH}.max_lag must be {implied} with strategy {self.strategy}, got "
                f"{staleness.max_lag}; use strategy n_step_ahead for another lag"
            )


def plain(knobs: AsyncPipelineConfig) -> dict[str, Any]:
    """Return all knobs as nested plain values, as a config holds them."""
    return dataclasses.asdict(
        knobs,
        dict_factory=lambda pairs: {k: list(v) if isinstance(v, tuple) else v for k, v in pairs},
    )


def knob_paths() -> tuple[str, ...]:
    """Return the paths of all knobs below `trainer.v1.async_pipeline`."""
    return tuple(knob.path for knob in knobs_of(AsyncPipelineConfig))


def canonical_strategy(value: Any, path: str) -> str:
    """Return the canonical name of a strategy, e.g. `on_policy` for `naive`.

    Raises ConfigError if there is no such strategy.
    """
    text = str(value)
    if ":" in text:
        return text
    name = text.replace("-", "_").lower()
    name = STRATEGY_ALIASES.get(name, name)
    if name not in STRATEGY_LAG:
        raise ConfigError(
            f"{path} must be one of {', '.join(STRATEGY_LAG)} or module:Class, got "
            f"{text!r}{hint(name, STRATEGY_LAG)}"
        )
    return name


def is_strategy(name: str) -> bool:
    """Return whether this trainer mode is a built-in or custom strategy of this package."""
    return name in STRATEGY_LAG or ":" in name
