# SPDX-License-Identifier: Apache-2.0
"""What a key of another system can become: the rules of `aliases.FOREIGN` and of `tools.translate`.

A rule gets the value of a key and the whole document that has it: the configuration of a run, or a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal, NamedTuple

from ...errors import ConfigError
from ..placement import (
    PLACED,
    POOLS,
    RATIOS,
    TASK_RATIOS,
    TASKS,
    TOLERANCE,
    check_share,
    role_called,
    wishes_of,
)

Kind = Literal["set", "nothing to do", "differs", "by hand", "unsupported", "unknown"]
"""What became of a key: overrides; nothing, because it is so anyway; overrides or nothing, with a difference
that matters; something that the user has to do; nothing, because the value is wrong or this package cannot do
it; or nothing is known of it.
"""
Document = Mapping[str, Any]


class Outcome(NamedTuple):
    """What a rule says about a key."""

    kind: Kind
    overrides: Mapping[str, Any] = {}
    """Values by path. In a file's outcome, a path with a leading + is not in verl's config. In the outcome of
    a key of a run, a knob has its path below our section, and a name without a dot that is no knob, such as
    `require_batches`, is combined with other keys later."""
    text: str = ""
    """What the user should know."""

    def describe(self) -> str:
        """Return the outcome as text."""
        return self.text or ", ".join(f"{path}={value}" for path, value in self.overrides.items())


Rule = Callable[[Any, Document], Outcome]


class WrongValue(Exception):
    """A rule refuses the value of its key, as `must be ..., got ...; remedy`."""


class Takes(NamedTuple):
    """The values that a key may have."""

    holds: Callable[[Any], bool]
    rule: str
    remedy: str

    def check(self, value: Any) -> None:
        """Raises WrongValue if the key may not have the value."""
        if not self.holds(value):
            raise WrongValue(f"must be {self.rule}, got {value!r}; {self.remedy}")


@dataclass(frozen=True)
class ForeignKey:
    """A key of another system that a run understands."""

    path: str
    """Its place in the config."""
    rule: Rule
    sets: tuple[str, ...] = ()
    """Paths of the knobs that it may set."""
    meaning: str = ""
    """For the reference, in Markdown; empty if an earlier entry of the table documents both."""
    unique: bool = True
    """Whether verl has no key of this name, so that the name in another place is a mistake."""

    def apply(self, value: Any, document: Document) -> Outcome:
        """Return what becomes of a value. Raises ConfigError if it is wrong."""
        try:
            return self.rule(value, document)
        except WrongValue as error:
            raise ConfigError(f"{self.path} {error}") from None


@dataclass
class Draft:
    """Values proposed so far, by their paths, and the key that proposed each."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def propose(self, name: str, value: Any, source: str) -> None:
        """Record a value. Raises ConfigError if another key proposed a different one."""
        if name in self.values and self.values[name] != value:
            raise ConfigError(
                f"{source} asks for {name}={value} but {self.sources[name]} for {self.values[name]}; keep "
                "one of them"
            )
        self.values[name] = value
        self.sources.setdefault(name, source)


# Rules.


def to(
    *paths: str,
    as_: Callable[[Any], Any] = lambda value: value,
    takes: Takes | None = None,
    text: str = "",
) -> Rule:
    """Set these paths to the value, converted by `as_`."""

    def rule(value: Any, document: Document) -> Outcome:
        if takes is not None:
            takes.check(value)
        return Outcome("set", dict.fromkeys(paths, as_(value)), text)

    return rule


def nothing(text: str) -> Rule:
    """The key needs no counterpart."""
    return lambda value, document: Outcome("nothing to do", text=text)


def differs(text: str, **overrides: Any) -> Rule:
    """There is something similar, or nothing."""
    return lambda value, document: Outcome("differs", overrides, text)


def unsupported(text: str) -> Rule:
    """This package cannot do it."""
    return lambda value, document: Outcome("unsupported", text=text)


def only(expected: Any, text: str, otherwise: str) -> Rule:
    """The key is as it is here anyway if it has the expected value; for other values, say `otherwise`."""

    def rule(value: Any, document: Document) -> Outcome:
        same = value == expected
        return Outcome("nothing to do" if same else "differs", text=text if same else otherwise)

    return rule


def required(expected: Any, remedy: str, text: str = "nothing: it is so") -> Rule:
    """The key must have the expected value, as everything here does."""

    def rule(value: Any, document: Document) -> Outcome:
        same = value == expected and isinstance(value, bool) == isinstance(expected, bool)
        Takes(lambda value: same, f"{expected!r} with this pipeline", remedy).check(value)
        return Outcome("nothing to do", text=text)

    return rule


def left_out(remedy: str) -> Rule:
    """The key has no meaning here."""
    return to(takes=Takes(lambda value: False, "left out with this pipeline", remedy))


def pools_of_ratios(ratios: Any) -> dict[str, dict[str, Any]]:
    """Translate `[train, logp, ref_logp, generate]`: equal neighbours share a pool if all then sum to 1.

    `[0.5, 0.5, 0.5, 0.5]` means one pool for the first three and one for generation,
    `[0.25, 0.25, 0.25, 0.25]` means four pools. Raises ConfigError if no sharing, or more than one, fits.
    """
    if not isinstance(ratios, Sequence) or isinstance(ratios, str) or len(ratios) != 4:
        raise ConfigError(
            f"{RATIOS} must be [train, logp, ref_logp, generate], got {ratios!r}; e.g. [0.5,0.5,0.5,0.5]"
        )
    for ratio in ratios:
        check_share(ratio, RATIOS)

    train, logp, ref, generate = (float(ratio) for ratio in ratios)
    shares = (train, logp, ref)
    fitting = []
    for cuts in (cut for size in range(3) for cut in combinations((1, 2), size)):
        groups = [shares[a:b] for a, b in zip((0, *cuts), (*cuts, 3), strict=True)]
        equal = all(max(group) - min(group) < TOLERANCE for group in groups)
        if equal and abs(sum(group[0] for group in groups) + generate - 1) < TOLERANCE:
            fitting.append(groups)

    if len(fitting) != 1:
        why = "no sharing of pools makes them sum to 1"
        if fitting:
            why = (
                f"they sum to 1 in {len(fitting)} ways, "
                f"{' and '.join(_as_shared(groups) for groups in fitting)}"
            )
        raise ConfigError(
            f"{RATIOS}: {why}, got {list(ratios)}; make neighbours among train, logp, ref_logp equal to "
            f"share a pool, or set {POOLS}"
        )

    names, pools = iter(("train", "logp", "ref_logp")), {}
    for group in fitting[0]:
        roles = [next(names) for _ in group]
        pools[roles[0]] = {"roles": roles, "share": group[0]}
    return pools | {"generate": {"roles": ["generate"], "share": generate}}


def _as_shared(groups: Sequence[Sequence[float]]) -> str:
    names = iter(("train", "logp", "ref_logp"))
    return " | ".join("+".join(next(names) for _ in group) for group in groups)


def pools_of_tasks(tasks: Any, ratios: Any) -> dict[str, dict[str, Any]]:
    """Translate `[[logp, actor-train], ref_logp, generate]` with a share for each entry.

    Raises ConfigError if an entry or its share is wrong.
    """
    if not isinstance(tasks, Sequence) or isinstance(tasks, str) or not tasks:
        raise ConfigError(
            f"{TASKS} must be a list of stages and lists of stages, got {tasks!r}; e.g. "
            "[[logp,actor-train],ref_logp,generate]"
        )
    if not isinstance(ratios, Sequence) or isinstance(ratios, str) or len(ratios) != len(tasks):
        raise ConfigError(
            f"{TASK_RATIOS} must have a share for each of the {len(tasks)} entries of {TASKS}, got "
            f"{ratios!r}; add it"
        )

    pools: dict[str, dict[str, Any]] = {}
    for task, ratio in zip(tasks, ratios, strict=True):
        roles = sorted(
            (role_called(role, TASKS) for role in (task if isinstance(task, list | tuple) else [task])),
            key=PLACED.index,
        )
        check_share(ratio, TASK_RATIOS)
        name = roles[0] if roles else ""
        if name in pools:
            raise ConfigError(f"{TASKS} must name {name} once, got {tasks!r}; remove one")
        pools[name] = {"roles": roles, "share": float(ratio)}
    wishes_of(pools, TASKS)
    return pools


# The off-policy losses of ROLL's `pg_variant`, each with its name in verl's registry: its `loss_mode`.
#
# The loss of each token before verl aggregates them. A is the token's advantage, r = pi / pi_old the ratio
# to the old policy, and sg(x) is x without a gradient:
#
#     vanilla   -A log pi                                    REINFORCE (Williams 1992)
#     ppo       -min(rA, clip(r, 1-e, 1+e) A)                arXiv 1707.06347
#               where A < 0, at most -cA                     dual clip, arXiv 1912.09729
#     tis       -sg(clip(r, lower, upper)) A log pi          truncated importance sampling, arXiv 1802.01561
#     topr      -A log pi where A > 0,
#               -sg(min(r, 1)) A log pi elsewhere            ROLL's form of arXiv 2503.14286
#     cispo     -sg(clip(r, 1-e_low, 1+e_high)) A log pi     arXiv 2506.13585
#     kimi15    -A log pi + tau/2 (log r)^2                  ROLL's form of arXiv 2501.12599
#
# The two papers use the ratio of the whole response, the product of its tokens' ratios: TOPR in the taper
# (`topr_ratio_level: sequence`), Kimi k1.5 inside the square, once per response, which nothing here
# computes.
#
# verl has four of them: PPO is its `vanilla`, REINFORCE its `gpg` (here `policy_gradient`, which adds a
# metric), kimi15 its `dro`, and `cispo` has the same name.
LOSS_OF_VARIANT: Mapping[str, str] = {
    "vanilla": "policy_gradient",  # not verl's `vanilla`, which is PPO
    "ppo": "vanilla",
    "tis": "tis",
    "topr": "topr",
    "cispo": "cispo",
    "kimi15": "dro",
}
"""The loss_mode of each pg_variant."""

OWN_LOSSES = ("policy_gradient", "tis", "topr")
"""Losses that `verl_bridge.workers.loss_registry` adds to verl's registry."""

LOSS_CONFIG = "recipe.async_pipeline.verl_bridge.workers.loss_registry.OffPolicyLossConfig"
"""`actor_rollout_ref.actor.policy_loss._target_`, so that verl accepts the parameters of our losses."""
