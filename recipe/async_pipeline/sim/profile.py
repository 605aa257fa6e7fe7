# SPDX-License-Identifier: Apache-2.0
"""What a workload costs, as a file: how long answers are, what decoding, each stage and a weight update take.

Times are seconds; `device_s` and `token_s` of a stage are device-seconds. A profile knows nothing of a
layout: what
it says is carried over to any number of devices by the laws below.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from ..errors import ConfigError
from .distribution import Distribution, largest, smallest

PROFILES = Path(__file__).resolve().parents[3] / "configs" / "profiles"
STAGES = (
    "draw",
    "assemble",
    "logp",
    "ref_logp",
    "values",
    "advantage",
    "update",
    "critic",
    "gather",
    "finish",
)


def _require(ok: bool, path: str, rule: str, value: Any) -> None:
    if not ok:
        raise ConfigError(f"{path} {rule}, got {value!r}; mend it in the profile")


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one optimizer step trains on: `groups` prompts, or so many for each device of the cluster."""

    groups: int | None = None
    groups_per_device: float | None = None
    """The batch grows with the cluster (weak scaling)."""
    answers: int = 8
    """To each prompt."""

    def __post_init__(self) -> None:
        if (self.groups is None) == (self.groups_per_device is None):
            raise ConfigError("batch must have groups or groups_per_device; give one of them")
        _require(self.groups is None or self.groups >= 1, "batch.groups", "must be >= 1", self.groups)
        rate = self.groups_per_device
        _require(rate is None or rate > 0, "batch.groups_per_device", "must be > 0", rate)
        _require(self.answers >= 1, "batch.answers", "must be >= 1", self.answers)

    def on(self, devices: int) -> int:
        """Groups of a step on a cluster of this size."""
        return (
            self.groups if self.groups is not None else max(1, round((self.groups_per_device or 0) * devices))
        )


class Answers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What comes back to a prompt."""

    tokens: Distribution
    """That the model writes in one answer, over all its turns, which share them evenly."""
    prompt_share: float = 0.0
    """Share of the variance of log(tokens) that belongs to the prompt: answers to a hard one are all long."""
    prompt_tokens: Distribution = 0.0
    turns: Distribution = 1.0
    observation_tokens: float = 0.0
    """That a tool's result adds, between two turns."""
    tool_s: Distribution = 0.0
    """From the end of a turn to the request for the next one."""
    request_s: float = 0.0
    """Of each turn beside the engine's work: the way there and back."""
    reward_s: Distribution = 0.0
    """From an answer's end to its score; scores do not wait for each other."""

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
    """A replica's engine: each step gives one token to each answer that it works on, and takes longer the
    more they are.

    `token_s` are the seconds of a step at the `concurrency` beside it, with straight lines between; beyond
    the last
    the last line goes on. Reading a prompt holds all answers of the replica up.
    """

    concurrency: tuple[int, ...] = (1,)
    token_s: tuple[float, ...]
    prefill_token_s: float = 0.0
    slots: int = 256
    """Answers that a replica works on at once; others wait in its queue."""

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
        """Seconds of one step of the engine with so many answers."""
        xs, ys = self.concurrency, self.token_s
        if len(xs) == 1 or concurrency <= xs[0]:
            return ys[0]
        at = next((i for i in range(1, len(xs)) if concurrency <= xs[i]), len(xs) - 1)
        slope = (ys[at] - ys[at - 1]) / (xs[at] - xs[at - 1])
        return ys[at] + slope * (concurrency - xs[at])


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a stage takes for one batch.

    fixed_s + (device_s + token_s x tokens) x (serial_share + (1 - serial_share) / devices)
    """

    fixed_s: float = 0.0
    """However many devices: launching, balancing, waiting for the slowest rank."""
    device_s: float = 0.0
    """Work of a batch."""
    token_s: float = 0.0
    """Work of a token, prompts and observations included."""
    serial_share: float = 0.0
    """Of the work that more devices do not make shorter (Amdahl)."""
    cv: float = 0.0
    """Spread from step to step, standard deviation over mean; lognormal."""

    def __post_init__(self) -> None:
        for name in ("fixed_s", "device_s", "token_s", "serial_share", "cv"):
            _require(getattr(self, name) >= 0, name, "of a stage must be >= 0", getattr(self, name))
        _require(self.serial_share <= 1, "serial_share", "of a stage must be at most 1", self.serial_share)

    def seconds(self, tokens: float, devices: int) -> float:
        """On average. `devices`: of its pool; 0 is a host, which counts as one."""
        work = self.device_s + self.token_s * tokens
        return self.fixed_s + work * (self.serial_share + (1 - self.serial_share) / max(1, devices))


NOTHING = Stage()


class Stages(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All on the training devices, or on pools of their own; draw, assemble, advantage and finish on the
    host.
    """

    update: Stage
    logp: Stage = NOTHING
    ref_logp: Stage | None = None
    """None: there is no reference policy."""
    values: Stage | None = None
    critic: Stage | None = None
    """Both None: there is no critic."""
    advantage: Stage = NOTHING
    gather: Stage = NOTHING
    """Of weights into host memory, on the training devices."""
    draw: Stage = NOTHING
    """Of prompts."""
    assemble: Stage = NOTHING
    """Of a batch, when its groups are there."""
    finish: Stage = NOTHING
    """Bookkeeping after a step; the devices are free, the trainer is not."""

    def __post_init__(self) -> None:
        if (self.values is None) != (self.critic is None):
            raise ConfigError("stages.values and stages.critic belong together; name both or neither")


class Sync(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a version reaches one replica, after its gather."""

    transfer_s: float = 0.0
    """Until it lies beside the replica, which goes on meanwhile."""
    load_s: float = 0.0
    """From there until it is served."""
    stall_s: float = 0.0
    """The part of `load_s` in which the replica stands still."""
    loads_at_once: int | None = None
    """Replicas that are brought a version at the same time; None: as the pipeline does by default, see
    `knobs.loads_at_once`.
    """
    pull_s: float = 0.0
    """The same for a pool of forward-only models (log-probs), once a version."""
    switch_s: float = 0.0
    """Where training and generation share devices: seconds a step to make room for one another. For the
    synchronous layout.
    """

    def __post_init__(self) -> None:
        for name in ("transfer_s", "load_s", "stall_s", "pull_s", "switch_s"):
            _require(getattr(self, name) >= 0, f"sync.{name}", "must be >= 0", getattr(self, name))
        _require(
            self.stall_s <= self.load_s,
            "sync.stall_s",
            f"must be at most load_s, {self.load_s:g}",
            self.stall_s,
        )
        _require(
            self.loads_at_once is None or self.loads_at_once >= 1,
            "sync.loads_at_once",
            "must be >= 1",
            self.loads_at_once,
        )


class Failures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What goes wrong."""

    group: float = 0.0
    """Probability that a finished group cannot be scored; another prompt is drawn for it."""
    replica_mtbf_s: float | None = None
    """Mean time between failures of one replica, exponential. What it was answering starts anew elsewhere."""
    restart_s: float = 60.0
    """Until it serves again."""

    def __post_init__(self) -> None:
        _require(0 <= self.group < 1, "failures.group", "must be from 0 to below 1", self.group)
        mtbf = self.replica_mtbf_s
        _require(mtbf is None or mtbf > 0, "failures.replica_mtbf_s", "must be > 0", mtbf)
        _require(self.restart_s >= 0, "failures.restart_s", "must be >= 0", self.restart_s)


class Validation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The replicas keep the version that is validated; its own requests are not simulated."""

    every: int
    """Optimizer steps."""
    seconds: float

    def __post_init__(self) -> None:
        _require(self.every >= 1, "validation.every", "must be >= 1", self.every)
        _require(self.seconds >= 0, "validation.seconds", "must be >= 0", self.seconds)


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that a simulation needs to know of a workload and the machines under it."""

    origin: Literal["measured", "assumed"]
    note: str
    """Where the numbers come from; shown with every result."""
    batch: Batch
    answers: Answers
    decode: Decode
    stages: Stages
    sync: Sync = Sync()
    failures: Failures = Failures()
    validation: Validation | None = None
    devices_per_replica: int = 1
    devices_per_node: int = 8

    def __post_init__(self) -> None:
        _require(
            self.devices_per_replica >= 1, "devices_per_replica", "must be >= 1", self.devices_per_replica
        )
        _require(self.devices_per_node >= 1, "devices_per_node", "must be >= 1", self.devices_per_node)

    def roles(self) -> tuple[str, ...]:
        """Those that compute on devices, in the words of `placement.PLACED`."""
        there = {"ref_logp": self.stages.ref_logp, "critic": self.stages.critic}
        return tuple(
            role
            for role in ("train", "logp", "ref_logp", "critic", "generate")
            if there.get(role, NOTHING) is not None
        )


def load(name: str) -> Profile:
    """Read a profile by path, or a shipped one by name. Raises ConfigError: there is none, or it is wrong."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else PROFILES / f"{name}.yaml"
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=Profile)
    except FileNotFoundError:
        shipped = ", ".join(sorted(p.stem for p in PROFILES.glob("*.yaml")))
        raise ConfigError(f"no profile {name!r}; give a .yaml file, or one of {shipped}") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"profile {path}: {' '.join(str(error).split())}") from None


def dump(profile: Profile) -> str:
    """As YAML; what has its default is left out."""
    import yaml

    text: str = yaml.safe_dump(_sparse(profile), sort_keys=False, default_flow_style=None, width=120)
    return text


def _sparse(value: Any) -> Any:
    """Plain values; fields that have their defaults are left out."""
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
