# SPDX-License-Identifier: Apache-2.0
"""Our own knobs, each with its default and its rule.

Pure: takes plain values, imports neither verl nor ray. Every complaint is one line: path, rule, value,
remedy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.bad_data import NO_SCORE, POLICIES, Policies, is_finite
from ..errors import ConfigError
from ..strategies import STRATEGIES
from .paths import hint

OWN = "trainer.v1.async_pipeline"
STRATEGY_LAG: Mapping[str, int | None] = {name: s.implied_lag for name, s in STRATEGIES.items()}
"""The `max_lag` that each strategy stands for, or None if the user chooses it."""
STRATEGY_ALIASES = {"naive": "on_policy"}
DEFAULT_STRATEGY = "one_step_off"
IN_FLIGHT = ("keep", "abort", "drain")
"""What may become of requests in flight when a replica loads; see `weight_sync.versioned_engine`."""
STAGES = ("host", "device")
"""Where a version waits for its load; see `weight_sync.spare`."""
STALE = ("wait", "resume", "drop")
"""What may become of a group that holds a step up; see `core.message_queue`."""
OLD_LOGP = ("trainer", "rollout", "logp_pool")
"""Whose policy old log-probs are of; see `AsyncPipelineConfig.old_logp`."""
VALIDATION = ("parallel", "pause")
"""What generation for training does while a version is validated."""
REWARD_FAILURE = ("fail", "drop", "score")
"""What becomes of a group with an answer that the reward function could not score."""
LOADING_SHARE = 8
"""One replica in so many may load while the others answer."""
MOST_LAG = 1000
"""A lane of the pipeline is made for each version of lag, so a slip of the pen should not make millions."""
LONGEST_S = 1e9
"""What a timer can be set to."""
DEFAULT_AHEAD = 3
"""max_lag of n_step_ahead and fully_async when nothing names one."""


@dataclass(frozen=True, kw_only=True)
class AsyncPipelineConfig:
    """The knobs of the pipeline, under `trainer.v1.async_pipeline`."""

    strategy: str = DEFAULT_STRATEGY
    """on_policy, one_step_off, n_step_ahead, fully_async, or `module:Class` of one's own."""
    max_lag: int = 1
    """Hard bound: versions that a trajectory may be older than the trainer. Implied by the first two."""
    depth: int | None = None
    """Batches that may be on their way beside the one that trains; default max_lag. Less leaves time for
    stragglers.
    """
    oldest_share: float = 1.0
    """Share of each batch that may have the full max_lag; the rest is at least one version younger."""
    stale: str = "wait"
    """An unfinished group that holds a step up: wait for it, resume (answer it again with newer weights),
    or drop it.
    """
    single_mini_batch: bool = False
    """One optimizer update a step, over the whole batch; else one for each `actor.ppo_mini_batch_size`
    prompts.
    """
    sync_every: int = 1
    """Optimizer steps from one publication of weights to the next; versions count steps all the same."""
    wait_timeout_s: float = 1800.0
    """Deadline of each wait of a role for items, room, a lease or a version, and of each of its calls into
    verl.
    """
    loop_stall_s: float = 60.0
    """Seconds that the trainer's event loop may not turn, before stacks go to diagnosis.txt; the run goes
    on.
    """
    publish_timeout_s: float = 600.0
    """Deadline for one replica to load and prove one version."""
    step_down_after: int = 3
    """Publications in a row for which a replica had to be fenced, before less is done asynchronously; 0:
    never.
    """
    step_up_after: int = 20
    """Good publications in a row, before more is done asynchronously again."""
    proof_tensors: int = 16
    """Tensors compared with the trainer's after each load; a rotating sample covers all in turn."""
    preduce_bucket_size_mb: int = 512
    """Size of the host buckets that the trainer gathers into."""
    consume_bucket_size_mb: int = 128
    """MB that a replica loads at a time; bounds the extra device memory of a load."""
    in_flight: str = "keep"
    """Requests being answered when a replica loads: keep (go on), abort (start again from what they have),
    drain.
    """
    stage: str = "host"
    """device: copy a version to the replica's devices first, beside generation; costs the weights' memory
    there.
    """
    reuse_prefixes: bool = False
    """New requests may hit prefixes that earlier versions cached, so their answers mix versions unseen."""
    loads_at_once: int | None = None
    """Replicas that load a version at the same time, while the others answer; default an eighth of them,
    at least one.
    """
    pools: Mapping[str, Any] | None = None
    """Which roles compute on which devices, `{name: {roles: [...], devices: 2}}` or `share: 0.25`; see
    `placement`.
    """
    old_logp: str | None = None
    """The proximal policy of step s: trainer (version s-1), rollout (what the engine said), logp_pool
    (version s-2, on
    devices of its own beside step s-1). Default: logp_pool where logp has its own pool and max_lag > 0,
    else trainer."""
    ref_refresh_every: int = 0
    """Steps after which the reference policy is replaced by the trained one; 0: never."""
    validation: str = "parallel"
    """While a version is validated, training goes on and replicas keep that version; prompts for training are
    answered
    beside it (parallel), or wait until it is over (pause)."""
    reward_while_generating: bool = True
    """Score each answer as it is finished; else a batch when all of it is generated, which costs time and
    gains nothing.
    """
    reward_timeout_s: float | None = None
    """Seconds that one call of the reward function may take, in a process that is killed then; None: no
    limit, no process.
    """
    reward_attempts: int = 2
    """Calls for one answer before it counts as not scored."""
    reward_concurrency: int = 8
    """Calls at once in each reward worker (`reward.num_workers`); for a plain function as many processes."""
    reward_batch: int | None = None
    """Answers in one call, for a function that takes lists; None: it takes one answer."""
    reward_memory_mb: int | None = None
    """Address space of each of these processes, beyond which it gets no more memory; None: no limit."""
    reward_cpu_s: float | None = None
    """CPU time of one call, of all its threads together; None: no limit."""
    reward_failure: str = "fail"
    """An answer that could not be scored: fail (the run ends), drop (its group is not trained), score
    (`reward_default`).
    """
    reward_default: float = 0.0
    bad_data: Policies = Policies()
    """What becomes of a group whose data is bad, by kind: fail, drop, and where that can be, keep."""
    prompt_attempts: int = 2
    """Times that a prompt is answered before it counts as poisoned: its group has failed, and it is not
    answered again.
    """
    run_dir: str | None = None
    """Where events, metrics and the summary go; default outputs/<project_name>/<experiment_name>."""
    custom_roles: tuple[str, ...] = ()
    """Roles of one's own to insert, each as `module:Class@after->before`."""

    @classmethod
    def of(cls, own: Mapping[str, Any]) -> AsyncPipelineConfig:
        """Out of plain values, as they stand in a config; what is no knob, or None, is left out. Raises
        ConfigError.
        """
        plain = {name: value for name, value in own.items() if name in own_fields() and value is not None}
        if "bad_data" in plain:
            plain["bad_data"] = _policies(plain["bad_data"])
        if "custom_roles" in plain:
            plain["custom_roles"] = tuple(plain["custom_roles"])
        return cls(**plain)

    def __post_init__(self) -> None:
        _require(
            0 <= self.max_lag <= MOST_LAG,
            "max_lag",
            f"must be >= 0 and at most {MOST_LAG}",
            self.max_lag,
            "use 0 for on-policy",
        )
        for name in ("wait_timeout_s", "publish_timeout_s", "loop_stall_s"):
            value = getattr(self, name)
            _require(
                0 < value <= LONGEST_S,
                name,
                f"must be > 0 and at most {LONGEST_S:g} seconds",
                value,
                "leave it out for the default",
            )
        _require(
            self.step_down_after >= 0,
            "step_down_after",
            "must be >= 0",
            self.step_down_after,
            "0 never steps down",
        )
        for name in (
            "sync_every",
            "step_up_after",
            "proof_tensors",
            "preduce_bucket_size_mb",
            "consume_bucket_size_mb",
            "prompt_attempts",
        ):
            value = getattr(self, name)
            _require(value >= 1, name, "must be >= 1", value, "leave it out for the default")
        for name, choices in (
            ("in_flight", IN_FLIGHT),
            ("stage", STAGES),
            ("stale", STALE),
            ("validation", VALIDATION),
            ("reward_failure", REWARD_FAILURE),
        ):
            value = getattr(self, name)
            _require(
                value in choices,
                name,
                f"must be one of {', '.join(choices)}",
                value,
                f"{choices[0]} is the default",
            )
        if self.loads_at_once is not None:
            _require(
                self.loads_at_once >= 1,
                "loads_at_once",
                "must be >= 1",
                self.loads_at_once,
                "leave it out for an eighth of the replicas",
            )
        self._check_rewards()
        if self.old_logp is not None:
            _require(
                self.old_logp in OLD_LOGP,
                "old_logp",
                f"must be one of {', '.join(OLD_LOGP)}",
                self.old_logp,
                "leave it out for the default",
            )
        _require(
            self.ref_refresh_every >= 0,
            "ref_refresh_every",
            "must be >= 0",
            self.ref_refresh_every,
            "0 is never",
        )
        for spec in self.custom_roles:
            ok = spec.count("@") == 1 and spec.count("->") == 1 and ":" in spec.split("@")[0]
            _require(
                ok, "custom_roles", "entries must read module:Class@after->before", spec, "see the README"
            )
        self._check_ages()
        implied = STRATEGY_LAG.get(self.strategy)
        if implied is not None and implied != self.max_lag:
            raise ConfigError(
                f"{OWN}.max_lag must be {implied} with strategy {self.strategy}, got {self.max_lag}; "
                "use strategy n_step_ahead for another lag"
            )

    def _check_rewards(self) -> None:
        for name in (
            "reward_timeout_s",
            "reward_cpu_s",
            "reward_attempts",
            "reward_concurrency",
            "reward_batch",
            "reward_memory_mb",
        ):
            value = getattr(self, name)
            least = "> 0" if name.endswith("_s") else ">= 1"
            _require(
                value is None or 0 < value <= LONGEST_S,
                name,
                f"must be {least} and at most {LONGEST_S:g}",
                value,
                "leave it out for the default",
            )
        _require(
            is_finite(self.reward_default),
            "reward_default",
            "must be a finite number",
            self.reward_default,
            "0.0 is the default",
        )
        if self.reward_timeout_s is None:
            for name in (
                "reward_batch",
                "reward_attempts",
                "reward_concurrency",
                "reward_memory_mb",
                "reward_cpu_s",
            ):
                if getattr(self, name) != getattr(type(self), name):
                    raise ConfigError(
                        f"{OWN}.{name} wants a limit for the calls, got {getattr(self, name)!r}; set "
                        f"{OWN}.reward_timeout_s"
                    )

    def _check_ages(self) -> None:
        share = self.oldest_share
        if self.depth is not None:
            ok = 0 <= self.depth <= self.max_lag
            _require(
                ok,
                "depth",
                f"must be from 0 to max_lag, {self.max_lag}",
                self.depth,
                "leave it out for max_lag",
            )
        _require(0 < share <= 1, "oldest_share", "must be above 0 and at most 1", share, "1 is the default")
        if self.max_lag == 0:
            _require(
                share == 1,
                "oldest_share",
                "must be 1 with max_lag 0",
                share,
                "leave it out, or raise max_lag",
            )
        depth = self.max_lag if self.depth is None else self.depth
        longest = depth + (share == 1)
        _require(
            self.sync_every <= longest,
            "sync_every",
            f"must be at most {longest} with a depth of {depth} and oldest_share {share:g}, or prompts "
            "would wait for "
            "weights that wait for them",
            self.sync_every,
            f"set max_lag (and depth) to {self.sync_every - (share == 1)} or more",
        )


def loads_at_once(asked: int | None, replicas: int) -> int:
    """How many replicas load a version at the same time, while the others answer. None: an eighth, at
    least one.
    """
    return min(replicas, max(1, replicas // LOADING_SHARE) if asked is None else asked)


def plain_defaults() -> dict[str, Any]:
    """What each knob is if nobody says anything, in plain values."""
    return dataclasses.asdict(AsyncPipelineConfig())


def _policies(value: Any) -> Policies:
    """Raises ConfigError: no mapping, an unknown kind, or a policy that a kind cannot have."""
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{OWN}.bad_data must be a section of kinds, got {value!r}; e.g. {{empty_answer: fail}}"
        )
    for kind, policy in value.items():
        if kind not in POLICIES:
            if kind == NO_SCORE:
                raise ConfigError(
                    f"{OWN}.bad_data.{kind} is unknown, got {policy!r}; {OWN}.reward_failure says what "
                    "becomes of such an answer"
                )
            raise ConfigError(
                f"{OWN}.bad_data.{kind} is unknown, got {policy!r}{hint(str(kind), POLICIES)}; kinds: "
                f"{', '.join(POLICIES)}"
            )
        _require(
            policy in POLICIES[kind],
            f"bad_data.{kind}",
            f"must be one of {', '.join(POLICIES[kind])}",
            policy,
            f"{POLICIES[kind][0]} is the default",
        )
    return Policies(**value)


def own_fields() -> tuple[str, ...]:
    """Names of all knobs under `trainer.v1.async_pipeline`."""
    return tuple(f.name for f in dataclasses.fields(AsyncPipelineConfig))


def canonical_strategy(value: Any, path: str) -> str:
    """`one-step-off` and `naive` in our spelling. Raises ConfigError: no such strategy."""
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
    """Is this trainer mode one of ours or, written `module:Class`, somebody's own?"""
    return name in STRATEGY_LAG or ":" in name


def _require(ok: bool, name: str, rule: str, value: Any, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"{OWN}.{name} {rule}, got {value!r}; {remedy}")
