# SPDX-License-Identifier: Apache-2.0
"""The costs of a profile for the bound of the step time in `core.lag.bound`, which has the law.

The engines are one more pool, `generate`: they write the tokens of a step, at the rate of the most responses
that can be in flight. In the loop, not only the slowest response but all tokens of the batch are written.

The rate of an engine with c responses, c / step_s(c), is replaced by the smallest concave function above
it, so that an even spread of responses over replicas and time is optimal (Jensen). The work is taken from the
responses that a simulation with the same seed draws, so that both have the same luck.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ...config.placement import TEACHER
from ...core.lag import bound as law
from ...core.lag.bound import LoopCosts
from .profile import Decode, Profile
from .simulated.draws import CHUNK, Draws, alone_s
from .simulated.trainer import Setting

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_HALVINGS = 60


@dataclass(frozen=True, kw_only=True)
class BatchWork:
    """The work of a step's responses, averaged over the steps."""

    written_tokens: float
    """Tokens that engines write."""
    read_s: float
    """Seconds of one engine for reading prompts and observations."""
    trained_tokens: float
    """Tokens that are trained on."""
    tail_s: float
    """Seconds from a batch's first request to its last score on otherwise idle engines."""
    tail_tokens: float
    """Tokens that the model writes in the last response."""
    group_s: float
    """Like `tail_s`, for an average group."""
    turns: float
    """Turns of all responses."""


@lru_cache(maxsize=64)
def work_of(profile: Profile, groups: int, batches: int, seed: int) -> BatchWork:
    """Return the work of the first `batches` x `groups` prompts."""
    import numpy as np

    number = groups * batches
    chunks = [_work_of_chunk(profile, at, seed) for at in range(-(-number // CHUNK))]
    group_s, last, tokens, prompt_tokens, turns = (
        np.concatenate(column)[:number] for column in zip(*chunks, strict=True)
    )

    of_batch = group_s.reshape(batches, groups)
    observed = (turns - profile.batch.answers).sum() * profile.answers.observation_tokens
    written, read = tokens.sum() / batches, (prompt_tokens.sum() + observed) / batches
    return BatchWork(
        written_tokens=float(written),
        read_s=float(read * profile.decode.prefill_token_s),
        trained_tokens=float(written + read),
        tail_s=float(of_batch.max(axis=1).mean()),
        tail_tokens=float(last.reshape(batches, groups)[np.arange(batches), of_batch.argmax(axis=1)].mean()),
        group_s=float(group_s.mean()),
        turns=float(turns.sum() / batches),
    )


@lru_cache(maxsize=1024)
def _work_of_chunk(profile: Profile, at: int, seed: int) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return columns over a chunk's groups, for a group on otherwise idle engines.

    The columns: seconds; tokens of the last response; tokens of all; prompt tokens; turns.
    """
    import numpy as np

    chunk = Draws(profile, seed).chunk(at)
    alone = alone_s(profile, chunk)
    return (
        alone.max(axis=1),
        chunk.tokens[np.arange(CHUNK), alone.argmax(axis=1)],
        chunk.tokens.sum(axis=1),
        chunk.prompt_tokens.sum(axis=1),
        chunk.turns.sum(axis=1),
    )


@lru_cache(maxsize=16)
def concave_rate(decode: Decode) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the corners of the smallest concave function above an engine's token rate.

    Returns numbers of responses and tokens per second, both [corners].
    """
    corners: list[tuple[float, float]] = [(0.0, 0.0)]
    for c, step_s in enumerate(_step_times(decode), start=1):
        point = (float(c), max(c / step_s, corners[-1][1]))
        while len(corners) > 1 and _turns_up(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    return tuple(c for c, _ in corners), tuple(rate for _, rate in corners)


@lru_cache(maxsize=16)
def _step_times(decode: Decode) -> tuple[float, ...]:
    """Return the seconds of an engine's step with 1, 2, ... responses, up to all slots."""
    return tuple(decode.step_s(c) for c in range(1, decode.slots + 1))


def _interpolated(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the value at `x`, linear between the points, constant beyond the last one.

    For single values this is several times faster than numpy's.
    """
    at = bisect_right(xs, x) - 1
    if at >= len(xs) - 1:
        return ys[-1]
    return (ys[at + 1] - ys[at]) / (xs[at + 1] - xs[at]) * (x - xs[at]) + ys[at]


def _turns_up(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) <= (c[1] - a[1]) * (b[0] - a[0])


def generate_s(setting: Setting, work: BatchWork, batches_in_flight: float, stall_s: float) -> float:
    """Return the seconds in which the replicas can write the tokens of a step.

    Each replica is stopped for `stall_s` of them.
    """
    corners, rates = concave_rate(setting.profile.decode)
    replicas, n = setting.replicas, setting.profile.batch.answers
    open_responses = batches_in_flight * setting.groups * n / replicas
    stopped_s = work.read_s / replicas + stall_s

    def written(seconds: float) -> float:
        """Return the tokens written in `seconds`.

        Responses stay open while their replica is stopped, so more of them can be open while it runs.
        """
        decoding = seconds - stopped_s
        return (
            replicas * decoding * _interpolated(open_responses * seconds / decoding, corners, rates)
            if decoding > 0
            else 0.0
        )

    low, high = stopped_s, stopped_s + work.written_tokens / replicas / (rates[1] / corners[1]) + 1e-9
    while written(high) < work.written_tokens:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if written(middle) < work.written_tokens else (low, middle)
    return high


def bound_terms(setting: Setting, work: BatchWork | None = None) -> Mapping[str, float]:
    """Return the seconds per step that each constraint takes; no schedule is faster than the largest.

    Groups that fail are not counted: they cost extra.
    """
    profile, knobs = setting.profile, setting.knobs
    work = work or work_of(profile, setting.groups, setting.steps, setting.seed)
    stages, sync = profile.stages, profile.sync
    depth = knobs.staleness.batches_ahead
    stall_s = 0.0 if setting.shared else sync.stall_s / knobs.weight_sync.every

    terms = {pool: seconds for pool, seconds in _pools(setting, work).items() if seconds}
    generating = generate_s(setting, work, depth + 1, stall_s)
    if setting.shared:
        alone = generate_s(setting, work, 1, 0.0)
        terms = {"devices": sum(terms.values()) + max(work.tail_s, alone) + sync.switch_s}
        generating = alone
    else:
        terms["generate"] = generating

    taught_s = 0.0
    if (teacher := profile.teacher) is not None:
        taught_s = teacher.group_s
        terms |= {TEACHER: seconds} if (seconds := teacher.read_s(work.trained_tokens)) else {}
    costs = LoopCosts(
        tail_s=max(work.tail_s, generate_s(setting, work, depth + 1, 0.0)) + taught_s,
        group_s=work.group_s + taught_s,
        update_s=stages.update.seconds(work.trained_tokens, setting.devices_of("train")),
        weights_s=weights_s(setting),
    )
    return law.bound_terms(terms, costs, max_lag=knobs.staleness.max_lag, batches_ahead=depth)


def weights_s(setting: Setting) -> float:
    """Return the seconds from the end of a step until all replicas serve its weights."""
    sync, lanes = setting.profile.sync, -(-setting.replicas // setting.loads_at_once)
    gather_s = setting.profile.stages.gather.seconds(0, setting.devices_of("train"))
    return gather_s + sync.prepare_s + lanes * sync.turn_s


def _stage_seconds(setting: Setting, work: BatchWork) -> dict[str, float]:
    """Return the seconds per step of each stage that computes, except generation and the gather."""
    stages = setting.profile.stages
    of_role = {
        "train": stages.update,
        "logp": None if setting.old_logp in ("update", "rollout") else stages.logp,
        "ref_logp": stages.ref_logp,
        "critic": stages.critic,
        "values": stages.values,
    }
    return {
        role: 0.0 if stage is None else stage.seconds(work.trained_tokens, setting.devices_of(role))
        for role, stage in of_role.items()
    }


def _pools(setting: Setting, work: BatchWork) -> dict[str, float]:
    """Return the seconds per step that each pool computes, except generation."""
    placement, every = setting.placement, setting.knobs.weight_sync.every
    seconds = dict.fromkeys((pool.name for pool in placement.pools), 0.0)
    for role, taken in _stage_seconds(setting, work).items():
        pool = placement.pool_of("critic" if role == "values" else role)
        if pool is not None:
            seconds[pool.name] += taken

    train, own = placement.pool_of("train"), placement.own_pool_of("logp")
    assert train is not None, "every placement has one"
    seconds[train.name] += setting.profile.stages.gather.seconds(0, train.devices) / every
    if own is not None and setting.old_logp not in ("update", "rollout"):
        seconds[own.name] += setting.profile.sync.pull_s / every
    return seconds


def bound_s(setting: Setting) -> float:
    """Return the largest of the bounds."""
    return max(bound_terms(setting).values())


def estimate_s(setting: Setting, work: BatchWork | None = None, bound: float | None = None) -> float:
    """Estimate the step time, above the bound: the slowest response shares its engine, stages are sequential.

    `bound`: the largest of the bounds, where the caller has it.

    By Little's law, as many responses are open as it takes to write a step's tokens in one step; the more
    are open, the slower each is. A longer step thus has faster responses; the estimate is the step time at
    which both agree.
    """
    work = work or work_of(setting.profile, setting.groups, setting.steps, setting.seed)
    knobs, stages = setting.knobs, setting.profile.stages
    if bound is None:
        bound = max(bound_terms(setting, work).values())
    if setting.shared:
        return bound
    seconds = _stage_seconds(setting, work)
    forward_s = seconds["logp"] + stages.advantage.seconds(0, 0) + stages.assemble.seconds(0, 0)
    if setting.placement.own_pool_of("ref_logp") is None:
        forward_s += seconds["ref_logp"]
    updated_s, alone = weights_s(setting), setting.profile.decode.step_s(1)
    teacher = setting.profile.teacher
    taught_s = 0.0 if teacher is None else teacher.group_s

    def needed(step_s: float) -> float:
        slower_s = _step_at(setting, work.written_tokens / setting.replicas / step_s) - alone
        costs = LoopCosts(
            tail_s=work.tail_s + slower_s * work.tail_tokens + taught_s,
            # A finished group waits for its step, half a step on average.
            group_s=work.group_s
            + slower_s * work.tail_tokens * work.group_s / work.tail_s
            + taught_s
            + step_s / 2,
            forward_s=forward_s,
            update_s=seconds["train"],
            weights_s=updated_s,
        )
        lag, ahead = knobs.staleness.max_lag, knobs.staleness.batches_ahead
        return max(law.loop_terms(costs, max_lag=lag, batches_ahead=ahead, forward=True).values())

    low, high = bound, max(bound, needed(bound))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if needed(middle) > middle else (low, middle)
    return high


def _step_at(setting: Setting, rate: float) -> float:
    """Return an engine's step time at a rate of tokens per second, with as few responses as that takes."""
    decode = setting.profile.decode
    return _step_times(decode)[responses_at_once(decode, rate) - 1]


def responses_at_once(decode: Decode, rate: float) -> int:
    """Return the smallest number of responses with which an engine writes `rate` tokens per second.

    Returns its number of slots if it is never that fast.
    """
    step_s = _step_times(decode)
    low, high = 1, len(step_s)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if middle / step_s[middle - 1] < rate else (low, middle)
    return low
