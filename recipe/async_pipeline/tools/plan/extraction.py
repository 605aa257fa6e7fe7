# SPDX-License-Identifier: Apache-2.0
"""Extract a profile from a run's log.

Read directly: lengths, turns, waits and scoring times of responses, stage times, the parts of a weight
update. Fitted: the engine. A response of k tokens in m turns, written next to c other responses (c averaged
over its time), took

    m x request_s + k x (a + b x c)

by least squares without negative coefficients. One run cannot show how a stage scales with devices; that is
an assumption of the caller: the share `fixed_share` stays, the rest is divided by the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from ...config.knobs.weight_sync import concurrent_loads
from ...config.placement import TEACHER
from ...core.events import LogRecord
from .distribution import Distribution, histogram_of
from .profile import Answers, Batch, Decode, Failures, Profile, Stage, Stages, Sync, TeacherCosts, Validation
from .run_log import RunLog, begun_s, tokens_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

WARM_UP_STEPS = 2
"""First steps of a run, in which caches fill and code is compiled."""
FIXED_SHARE = 0.2
"""Assumed share of a stage's time that more devices do not reduce."""
NEGLIGIBLE_S = 1e-4
"""Shortest time per token, in seconds."""
FITTED = 100
"""Speeds of a teacher that are tried, twice: all, then the ones near the best."""
ENOUGH_GROUPS = 8
"""Groups dispatched after the first step that suffice to leave out the groups before it.

Groups that were dispatched earlier waited for the warm-up.
"""


def extract(run: RunLog, *, fixed_share: float = FIXED_SHARE, note: str = "") -> Profile:
    """Return the profile of a run; groups of the warm-up are left out if enough others remain."""
    settings = run.settings
    answers, decode = _answers_and_engine(run)

    return Profile(
        origin="measured",
        note=note
        or f"measured: {run.knobs.strategy}, {len(run.step_ends_s)} steps on {run.placement.devices} "
        f"devices{_caveat(run)}",
        batch=Batch(groups=int(settings["groups"]), answers=int(settings["answers"])),
        answers=answers,
        decode=decode,
        stages=_stages(run, fixed_share),
        sync=_sync(run),
        failures=Failures(group=_failed_share(run)),
        validation=_validation(run),
        teacher=_teacher(run),
        devices_per_replica=int(settings["devices_per_replica"]),
        devices_per_node=int(settings["devices_per_node"]),
    )


def _caveat(run: RunLog) -> str:
    """Return a caveat for the profile's note, or an empty string."""
    if len(run.warm_groups) >= ENOUGH_GROUPS:
        return ""
    return (
        f", too few to leave the warm-up out (only {len(run.warm_groups)} prompts were dispatched after the "
        "first step)"
    )


class _Table:
    """Columns over all responses of the groups that count."""

    def __init__(self, run: RunLog) -> None:
        import numpy as np

        groups = run.warm_groups if len(run.warm_groups) >= ENOUGH_GROUPS else run.groups
        for name in (
            "prompt_tokens",
            "tokens",
            "observation_tokens",
            "turns",
            "generate_s",
            "environment_s",
            "score_s",
        ):
            setattr(
                self, name, np.array([value for g in groups for value in g.fields[name]], dtype=np.float64)
            )

        sizes = [len(g.fields["tokens"]) for g in groups]
        self.sizes = sizes
        self.begun = np.repeat([begun_s(g) for g in groups], sizes)
        self.group_s = np.array([float(g.fields["seconds"]) for g in groups])

    prompt_tokens: Floats
    tokens: Floats
    observation_tokens: Floats
    turns: Floats
    generate_s: Floats
    environment_s: Floats
    score_s: Floats

    @property
    def answer_s(self) -> Floats:
        """Seconds from the first request to the score, without waits inside the worker."""
        return self.generate_s + self.environment_s + self.score_s


def _answers_and_engine(run: RunLog) -> tuple[Answers, Decode]:
    """Return the responses and the engine of a run's profile."""
    import numpy as np

    table = _Table(run)
    replicas = run.placement.own_pool_of("generate")
    assert replicas is not None, "engines have a separate pool"
    request_s, first_s, more_s = _fit_engine(
        table, replicas.devices // int(run.settings["devices_per_replica"])
    )

    slots = int(run.settings["slots"])
    concurrency, token_s = (
        ((1, slots), (first_s, first_s + more_s * (slots - 1))) if slots > 1 else ((1,), (first_s,))
    )

    # Time of a group in addition to its slowest response: the overhead around it.
    slowest = np.array([part.max() for part in np.split(table.answer_s, np.cumsum(table.sizes)[:-1])])
    overhead_s = float(max(0.0, np.mean(table.group_s - slowest)))
    several = bool((table.turns > 1).any())
    tool: Distribution = 0.0
    reward = table.score_s + overhead_s
    if several:
        tool = histogram_of((table.environment_s / np.maximum(1, table.turns - 1))[table.turns > 1])
    else:
        reward = reward + table.environment_s

    answers = Answers(
        tokens=histogram_of(np.maximum(1, table.tokens)),
        prompt_share=_prompt_share(np.log(np.maximum(1, table.tokens)), table.sizes),
        prompt_tokens=histogram_of(table.prompt_tokens),
        turns=histogram_of(np.maximum(1, table.turns)),
        observation_tokens=float(table.observation_tokens.sum() / max(1.0, (table.turns - 1).sum())),
        tool_s=tool,
        reward_s=histogram_of(reward),
        request_s=request_s,
    )
    return answers, Decode(concurrency=concurrency, token_s=token_s, slots=slots)


def _fit_engine(table: _Table, replicas: int) -> tuple[float, float, float]:
    """Fit the engine's speed.

    Returns the seconds of a request, of an engine step with one response, and more per further response.
    """
    import numpy as np

    neighbours = np.maximum(0.0, _concurrency(table) / replicas - 1)
    columns = np.stack([table.turns, table.tokens, table.tokens * neighbours], axis=1)

    # Drop the column with the most negative coefficient until none is negative.
    kept = [0, 1, 2]
    while True:
        found = np.linalg.lstsq(columns[:, kept], table.generate_s, rcond=None)[0]
        if (found >= 0).all() or len(kept) == 1:
            break
        kept.remove(kept[int(np.argmin(found))])

    by_column = dict(zip(kept, (float(max(0.0, f)) for f in found), strict=True))
    token_s = by_column.get(1, 0.0)
    if token_s < NEGLIGIBLE_S:  # short responses do not distinguish tokens from requests
        token_s = max(NEGLIGIBLE_S, token_s)
    return by_column.get(0, 0.0), token_s, by_column.get(2, 0.0)


def _concurrency(table: _Table) -> Floats:
    """Return the responses in the engines, averaged over the time of each response, itself included.

    A response of several turns counts with the share of its time that it spends in an engine.
    """
    import numpy as np

    spent = np.maximum(1e-9, table.generate_s + table.environment_s)
    weight = table.generate_s / spent

    begun, ended = table.begun, table.begun + spent
    times = np.concatenate([begun, ended])
    order = np.argsort(times, kind="stable")
    open_after = np.cumsum(np.concatenate([weight, -weight])[order])

    at = times[order]
    area = np.concatenate([[0.0], np.cumsum(open_after[:-1] * np.diff(at))])
    mean: Floats = (np.interp(ended, at, area) - np.interp(begun, at, area)) / spent
    return mean


def _prompt_share(logs: Floats, sizes: Sequence[int]) -> float:
    """Return the share of the variance between groups, by a one-way random-effects analysis of variance."""
    import numpy as np

    n = sizes[0]
    if n < 2 or len(sizes) < 2 or any(size != n for size in sizes) or logs.std() < 1e-6:
        return 0.0
    rows = logs.reshape(-1, n)
    within = rows.var(axis=1, ddof=1).mean()
    between = max(0.0, rows.mean(axis=1).var(ddof=1) - within / n)
    return round(float(np.clip(between / (between + within), 0.0, 1.0)), 3)


def _stages(run: RunLog, fixed_share: float) -> Stages:
    """Return the costs of all stages that the run had."""
    found = {
        name: _stage(run, name, fixed_share)
        for name in ("logp", "ref_logp", "values", "critic", "update", "gather")
    }
    host = {name: _stage(run, name, 1.0) for name in ("draw", "assemble", "advantage", "finish")}
    there = {name: stage for name, stage in (found | host).items() if stage is not None}
    return Stages(**there)


def _stage(run: RunLog, name: str, fixed_share: float) -> Stage | None:
    """Return the cost of a stage, or None if the run had no such stage."""
    by_step = run.stage(name)
    if not by_step:
        return None
    steady = [seconds for step, seconds in by_step.items() if step > WARM_UP_STEPS] or list(by_step.values())

    mean = fmean(steady)
    role = {"update": "train", "gather": "train", "values": "critic"}.get(name, name)
    pool = run.placement.pool_of(role)
    devices = 1 if pool is None else pool.devices

    scaling = mean * (1 - fixed_share) * devices
    tokens = fmean(run.tokens.values())
    by_tokens = name != "gather"
    return Stage(
        fixed_s=round(mean * fixed_share, 6),
        token_s=scaling / tokens if by_tokens else 0.0,
        device_s=0.0 if by_tokens else scaling,
        cv=round(pstdev(steady) / mean, 3) if mean else 0.0,
    )


def _sync(run: RunLog) -> Sync:
    """Return the mean cost of the weight updates after the first one, per replica."""
    served = [r for r in run.records if r.event == "SERVED"]
    served = served[1:] or served
    gathered = {r.fields["version"]: r.t for r in run.records if r.event == "GATHERED"}

    def each(record: LogRecord, name: str, default: str = "") -> float:
        """Return the mean of a figure over the replicas."""
        return float(record.fields.get(name, record.fields.get(default, 0.0))) / _replicas(record)

    before = 0.0
    overheads = []
    for r in served:
        took = r.t - max(before, gathered[r.fields["version"]])
        commit_s = each(r, "commit_s", "load_s")
        prepare_s = each(r, "transfer_s") + each(r, "load_s") - commit_s
        turns = -(-_replicas(r) // concurrent_loads(None, _replicas(r), commit_s))
        overheads.append(max(0.0, took - prepare_s - turns * commit_s))
        before = r.t

    load_s = round(fmean(each(r, "load_s") for r in served), 6)
    commit_s = round(min(load_s, fmean(each(r, "commit_s", "load_s") for r in served)), 6)
    return Sync(
        transfer_s=round(fmean(each(r, "transfer_s") for r in served) + fmean(overheads), 6),
        load_s=load_s,
        commit_s=commit_s,
        stall_s=round(min(fmean(each(r, "stall_s") for r in served), commit_s), 6),
    )


def _replicas(served: LogRecord) -> int:
    return max(1, int(served.fields["replicas"]))


def _failed_share(run: RunLog) -> float:
    """Return the share of groups that failed."""
    train = [r for r in run.records if r.event == "TRAINED"]
    failed = float(train[-1].fields.get("samples/failed", 0.0))
    return failed / (failed + len(run.groups))


def _validation(run: RunLog) -> Validation | None:
    """Return the validation's period and duration, or None if the run did not validate."""
    done = [r for r in run.records if r.event == "VALIDATED" and r.fields["version"] > 0]
    if not done:
        return None
    versions = [int(r.fields["version"]) for r in done]
    every = min((b - a for a, b in zip(versions, versions[1:], strict=False)), default=versions[0])
    return Validation(every=every, seconds=round(fmean(float(r.fields["seconds"]) for r in done), 3))


def _teacher(run: RunLog) -> TeacherCosts | None:
    """Return the costs of a run's teacher, or None if it had none.

    Fitted by least squares: groups are read one after another in the order in which they finished, each for
    a time in proportion to its tokens, and are handed on group_s later.
    """
    import numpy as np

    ends = {r.fields["key"]: r.t for r in run.records if (r.role, r.event) == (TEACHER, "OUTPUT")}
    unread = {r.fields.get("key") for r in run.records if r.event == "REJECTED"}
    finished = {
        r.fields["key"]: r.t
        for r in run.records
        if (r.role, r.event) == ("generate", "OUTPUT") and r.fields["key"] in ends.keys() - unread
    }
    if not finished:
        return None
    tokens = {group.fields["key"]: tokens_of(group) for group in run.groups}
    took = np.array([ends[key] - t for key, t in finished.items()])
    first = run.step_ends_s[0]
    counts = np.array([t >= first for t in finished.values()])
    counts = counts if counts.any() else ~counts

    def fixed_and_error(token_s: float) -> tuple[float, float]:
        free_s, waits = 0.0, []
        for key, t in finished.items():
            free_s = max(free_s, t) + token_s * tokens[key]
            waits.append(free_s - t)
        rest = (took - np.array(waits))[counts]
        fixed = max(0.0, float(rest.mean()))
        return fixed, float(((rest - fixed) ** 2).sum())

    step = float(took.max()) / min(tokens[key] for key in finished) / FITTED
    best = step * FITTED / 2
    for _ in range(2):
        tried = [best + (at - FITTED / 2) * step for at in range(FITTED + 1)]
        best = min((one for one in (0.0, *tried) if one >= 0), key=lambda one: fixed_and_error(one)[1])
        step *= 2 / FITTED
    pool = run.placement.pool_of(TEACHER)
    devices = 0 if pool is None else pool.devices
    return TeacherCosts(
        devices=devices, group_s=round(fixed_and_error(best)[0], 6), token_s=best * max(1, devices)
    )
