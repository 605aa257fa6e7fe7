# SPDX-License-Identifier: Apache-2.0
"""The costs of a workload as a file: response lengths, and times of decoding, stages and weight updates.

Times are in seconds; `device_s` and `token_s` of a stage are device-seconds. A profile does not depend on a
layout: the formulas below scale it to any number of devices.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...errors import ConfigError
from .distribution import Distribution, largest, smallest


def _shipped() -> Path:
    """Return the folder of the shipped profiles: the checkout's, or the installation's."""
    schemes = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    checkout = Path(__file__).resolve().parents[4] / "configs" / "profiles"
    installed = (
        Path(sysconfig.get_path("data", s)) / "share/async_pipeline/configs/profiles" for s in schemes
    )
    return next((folder for folder in (checkout, *installed) if folder.is_dir()), checkout)


PROFILES = _shipped()


def _require(ok: bool, path: str, rule: str, value: Any) -> None:
    """Raise ConfigError unless `ok`."""
    if not ok:
        raise ConfigError(f"{path} {rule}, got {value!r}; correct the profile")


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one optimizer step trains on: a fixed number of prompts, or a number per device of the cluster."""

    groups: int | None = None
    groups_per_device: float | None = None
    """Prompts per device: the batch grows with the cluster (weak scaling)."""
    answers: int = 8
    """Responses to each prompt."""

    def __post_init__(self) -> None:
        if (self.groups is None) == (self.groups_per_device is None):
            raise ConfigError("batch must have groups or groups_per_device; give one of them")

        _require(self.groups is None or self.groups >= 1, "batch.groups", "must be >= 1", self.groups)
        rate = self.groups_per_device
        _require(rate is None or rate > 0, "batch.groups_per_device", "must be > 0", rate)
        _require(self.answers >= 1, "batch.answers", "must be >= 1", self.answers)

    def on(self, devices: int) -> int:
        """Return the groups per step on a cluster of this size."""
        return (
            self.groups if self.groups is not None else max(1, round((self.groups_per_device or 0) * devices))
        )


class Answers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The responses to a prompt."""

    tokens: Distribution
    """Tokens that the model writes in one response, spread evenly over its turns."""
    prompt_share: float = 0.0
    """Share of the variance of log(tokens) between prompts: responses to a hard prompt are all long."""
    prompt_tokens: Distribution = 0.0
    turns: Distribution = 1.0
    observation_tokens: float = 0.0
    """Tokens that a tool's result adds between two turns."""
    tool_s: Distribution = 0.0
    """Seconds from the end of a turn to the request for the next one."""
    request_s: float = 0.0
    """Seconds that each turn's request takes in addition to the engine's work."""
    reward_s: Distribution = 0.0
    """Seconds from the end of a response to its score; scores do not wait for each other."""

    def __post_init__(self) -> None:
        _require(largest(self.tokens) >= 1, "answers.tokens", "must reach 1", largest(self.tokens))
        _require(
            0 <= self.prompt_share <= 1, "answers.prompt_share", "must be from 0 to 1", self.prompt_share
        )
        _require(
            smallest(self.turns) >= (1 if not _is_lognormal(self.turns) else 0),
            "answers.turns",
            "must be >= 1",
            smallest(self.turns),
        )

        for name in ("prompt_tokens", "observation_tokens", "request_s", "tool_s", "reward_s"):
            _require(
                smallest(getattr(self, name)) >= 0,
                f"answers.{name}",
                "must be >= 0",
                smallest(getattr(self, name)),
            )


class Decode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A replica's engine: a step gives one token to each response, and takes longer the more there are.

    `token_s` has the seconds of a step at each value of `concurrency`, interpolated linearly and
    extrapolated beyond the last. Reading a prompt delays all responses of the replica.
    """

    concurrency: tuple[int, ...] = (1,)
    token_s: tuple[float, ...]
    prefill_token_s: float = 0.0
    slots: int = 256
    """Responses that a replica works on at the same time; further ones wait in its queue."""

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.concurrency, self.concurrency[1:], strict=False))
        _require(
            bool(self.concurrency) and rising and self.concurrency[0] >= 1,
            "decode.concurrency",
            "must rise from 1 or more",
            list(self.concurrency),
        )
        _require(
            len(self.token_s) == len(self.concurrency),
            "decode.token_s",
            "must have one value for each concurrency",
            len(self.token_s),
        )

        never_faster = all(a <= b for a, b in zip(self.token_s, self.token_s[1:], strict=False))
        _require(
            self.token_s[0] > 0 and never_faster,
            "decode.token_s",
            "must be > 0 and not fall",
            list(self.token_s),
        )
        _require(self.prefill_token_s >= 0, "decode.prefill_token_s", "must be >= 0", self.prefill_token_s)
        _require(self.slots >= 1, "decode.slots", "must be >= 1", self.slots)

    def step_s(self, concurrency: int) -> float:
        """Return the seconds of one engine step with this number of responses."""
        xs, ys = self.concurrency, self.token_s
        if len(xs) == 1 or concurrency <= xs[0]:
            return ys[0]
        at = next((i for i in range(1, len(xs)) if concurrency <= xs[i]), len(xs) - 1)
        slope = (ys[at] - ys[at - 1]) / (xs[at] - xs[at - 1])
        return ys[at] + slope * (concurrency - xs[at])


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The time of a stage for one batch.

    fixed_s + (device_s + token_s x tokens) x (serial_share + (1 - serial_share) / devices)
    """

    fixed_s: float = 0.0
    """Seconds for any number of devices: launching, balancing, waiting for the slowest rank."""
    device_s: float = 0.0
    """Device-seconds per batch."""
    token_s: float = 0.0
    """Device-seconds per token, including prompts and observations."""
    serial_share: float = 0.0
    """Share of the work that more devices do not speed up (Amdahl)."""
    cv: float = 0.0
    """Standard deviation over mean of the time from step to step; lognormal."""

    def __post_init__(self) -> None:
        for name in ("fixed_s", "device_s", "token_s", "serial_share", "cv"):
            _require(getattr(self, name) >= 0, name, "of a stage must be >= 0", getattr(self, name))
        _require(self.serial_share <= 1, "serial_share", "of a stage must be at most 1", self.serial_share)

    def seconds(self, tokens: float, devices: int) -> float:
        """Return the mean time. `devices`: of the stage's pool; 0 is a host and counts as one."""
        work = self.device_s + self.token_s * tokens
        return self.fixed_s + work * (self.serial_share + (1 - self.serial_share) / max(1, devices))


NOTHING = Stage()


class Stages(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The stages, on training devices or separate pools; draw, assemble, advantage, finish on the host."""

    update: Stage
    logp: Stage | None = NOTHING
    """None if the rollout's log-probs are the old ones, which cost nothing."""
    ref_logp: Stage | None = None
    """None without a reference policy."""
    values: Stage | None = None
    critic: Stage | None = None
    """`values` and `critic` are both None without a critic."""
    advantage: Stage = NOTHING
    gather: Stage = NOTHING
    """Copying the weights to host memory, on the training devices."""
    draw: Stage = NOTHING
    """Drawing prompts."""
    assemble: Stage = NOTHING
    """Assembling a batch once its groups are complete."""
    finish: Stage = NOTHING
    """Bookkeeping after a step; the trainer is busy, its devices are free."""

    def __post_init__(self) -> None:
        if (self.values is None) != (self.critic is None):
            raise ConfigError("stages.values and stages.critic require each other; give both or neither")


class TeacherCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A distillation's teacher, which reads each group once it is finished.

    Groups are read in the order in which they finish, each by all devices, and are handed on `group_s` later.
    """

    devices: int = 1
    """In addition to the ones of a layout; 0 for a server that others provide."""
    group_s: float = 0.0
    """Seconds of a group that do not depend on the devices: requests, and storing the log-probs."""
    token_s: float = 0.0
    """Device-seconds per token, of prompts, responses and observations."""

    def __post_init__(self) -> None:
        for name in ("devices", "group_s", "token_s"):
            _require(getattr(self, name) >= 0, f"teacher.{name}", "must be >= 0", getattr(self, name))

    def read_s(self, tokens: float) -> float:
        """Return the seconds for which this many tokens occupy the devices."""
        return self.token_s * tokens / max(1, self.devices)


class Sync(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a version reaches one replica after the gather."""

    transfer_s: float = 0.0
    """Seconds until the version is on the replica's host; the replica keeps generating."""
    load_s: float = 0.0
    """Seconds from there until it is served, without the wait for a turn."""
    commit_s: float | None = None
    """Part of `load_s` for which replicas take turns, after all have prepared at once; None: all of it."""
    stall_s: float = 0.0
    """Part of the commit during which the replica does not generate."""
    loads_at_once: int | None = None
    """Replicas that commit at the same time; None for the default, see `concurrent_loads`."""
    pull_s: float = 0.0
    """Transfer and load for a pool of forward-only models (log-probs), per version."""
    switch_s: float = 0.0
    """Seconds per step to switch between training and generation on shared devices (synchronous layout)."""

    def __post_init__(self) -> None:
        for name in ("transfer_s", "load_s", "stall_s", "pull_s", "switch_s"):
            _require(getattr(self, name) >= 0, f"sync.{name}", "must be >= 0", getattr(self, name))
        _require(
            0 <= self.turn_s <= self.load_s,
            "sync.commit_s",
            f"must be from 0 to load_s, {self.load_s:g}",
            self.commit_s,
        )
        _require(
            self.stall_s <= self.turn_s,
            "sync.stall_s",
            f"must be at most commit_s (by default load_s), {self.turn_s:g}",
            self.stall_s,
        )
        _require(
            self.loads_at_once is None or self.loads_at_once >= 1,
            "sync.loads_at_once",
            "must be >= 1",
            self.loads_at_once,
        )

    @property
    def turn_s(self) -> float:
        """Seconds of a commit."""
        return self.load_s if self.commit_s is None else self.commit_s

    @property
    def prepare_s(self) -> float:
        """Seconds of transfer and load before the commit."""
        return self.transfer_s + self.load_s - self.turn_s


class Failures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Failures of groups and replicas."""

    group: float = 0.0
    """Probability that a finished group cannot be scored and is replaced by another prompt."""
    replica_mtbf_s: float | None = None
    """Mean time between failures of one replica, exponential; its responses restart on another one."""
    restart_s: float = 60.0
    """Seconds until a failed replica serves again."""

    def __post_init__(self) -> None:
        _require(0 <= self.group < 1, "failures.group", "must be from 0 to below 1", self.group)
        mtbf = self.replica_mtbf_s
        _require(mtbf is None or mtbf > 0, "failures.replica_mtbf_s", "must be > 0", mtbf)
        _require(self.restart_s >= 0, "failures.restart_s", "must be >= 0", self.restart_s)


class Validation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Validation, during which the replicas keep their version; its requests are not simulated."""

    every: int
    """Optimizer steps between validations."""
    seconds: float

    def __post_init__(self) -> None:
        _require(self.every >= 1, "validation.every", "must be >= 1", self.every)
        _require(self.seconds >= 0, "validation.seconds", "must be >= 0", self.seconds)


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that a simulation needs to know about a workload and its machines."""

    origin: Literal["measured", "assumed"]
    note: str
    """Origin of the numbers; shown with every result."""
    batch: Batch
    answers: Answers
    decode: Decode
    stages: Stages
    sync: Sync = Sync()
    failures: Failures = Failures()
    validation: Validation | None = None
    teacher: TeacherCosts | None = None
    """None without a distillation."""
    devices_per_replica: int = 1
    devices_per_node: int = 8

    def __post_init__(self) -> None:
        _require(
            self.devices_per_replica >= 1, "devices_per_replica", "must be >= 1", self.devices_per_replica
        )
        _require(self.devices_per_node >= 1, "devices_per_node", "must be >= 1", self.devices_per_node)

    def roles(self) -> tuple[str, ...]:
        """Return the stages that compute on devices, named as in `placement.PLACED`."""
        there = {
            "logp": self.stages.logp,
            "ref_logp": self.stages.ref_logp,
            "critic": self.stages.critic,
        }
        return tuple(
            role
            for role in ("train", "logp", "ref_logp", "critic", "generate")
            if there.get(role, NOTHING) is not None
        )


def shipped_names() -> str:
    """Return the names of the shipped profiles."""
    return ", ".join(sorted(path.stem for path in PROFILES.glob("*.yaml")))


def load(name: str) -> Profile:
    """Read a profile by path, or a shipped one by name. Raises ConfigError if it is missing or invalid."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else PROFILES / f"{name}.yaml"
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=Profile)
    except FileNotFoundError:
        if Path(name).is_dir():
            raise ConfigError(
                f"{name} is a directory; make a profile of a run with async-pipeline profile {name} --out "
                "FILE.yaml"
            ) from None
        raise ConfigError(f"no profile {name!r}; give a .yaml file, or one of {shipped_names()}") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"profile {path}: {' '.join(str(error).split())}") from None


def dump(profile: Profile) -> str:
    """Return the profile as YAML, without values that equal their defaults."""
    import yaml

    text: str = yaml.safe_dump(_sparse(profile), sort_keys=False, default_flow_style=None, width=120)
    return text


def _sparse(value: Any) -> Any:
    """Return plain values, without fields that equal their defaults."""
    if not isinstance(value, msgspec.Struct):
        return [_sparse(v) for v in value] if isinstance(value, tuple) else value
    config = value.__struct_config__
    tag = {config.tag_field: config.tag} if config.tag_field else {}
    fields = msgspec.structs.fields(value)
    return tag | {
        f.name: _sparse(getattr(value, f.name)) for f in fields if getattr(value, f.name) != f.default
    }


def _is_lognormal(of: Distribution) -> bool:
    return hasattr(of, "sigma")
