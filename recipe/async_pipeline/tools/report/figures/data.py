# SPDX-License-Identifier: Apache-2.0
"""Compute from the files of a run the numbers that a report shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ....core.events import Interval, LogRecord
from ....core.replay import busy_intervals
from ....observe.account.accountant import Accountant
from ....observe.account.accounting import Accounting, AccountingError
from ....observe.observers import ACCOUNT
from ....observe.run_directory.picture_folder import Picture
from ..drawing.series import Series, series_of
from .episode_figures import EpisodeFigures, episode_figures
from .run_reader import PREFIX, RunFiles

Span = tuple[float, float, str]
"""Start and end in seconds of the log's time, and the activity or its reason."""
FATES = ("trained", "filtered", "expired", "failed", "in_flight")


@dataclass(frozen=True, kw_only=True)
class Published:
    """One weight update; durations in seconds."""

    version: int
    t: float
    gather_s: float
    transfer_s: float
    load_s: float
    commit_s: float
    """The part of `load_s` for which replicas take turns."""
    stall_s: float
    num_bytes: float
    replicas: int
    explained_share: float | None = None
    """The share of the served elements that the engine's tables explain, or None if it is not known."""
    unexplained: str = ""
    """The first published tensors that they do not explain."""

    @property
    def prepare_s(self) -> float:
        """Transfer and load before the commit: a mean over the replicas, which prepare at once."""
        return (self.transfer_s + self.load_s - self.commit_s) / self.replicas


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The numbers of a run; fields that its files do not provide are empty."""

    name: str
    path: Path
    status: str
    strategy: str
    max_lag: int | None
    steps: int
    wall_s: float
    step_s: Sequence[float]
    samples_per_s: float | None
    """Trained responses per second, over all steps but the first."""
    accounting: Accounting | None = None
    """Account of the whole run."""
    warm: Accounting | None = None
    """Account without start-up and the first step."""
    roles: Mapping[str, Sequence[Interval]] = field(default_factory=dict)
    """Intervals in which each stage computed."""
    home: Mapping[str, str] = field(default_factory=dict)
    """Stage to pool."""
    pools: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    """Activity of each pool, as the stages saw it."""
    step_ends: Mapping[int, float] = field(default_factory=dict)
    lag_share: Mapping[int, float] = field(default_factory=dict)
    """Lag in versions to the share of trained responses with that lag."""
    lag_mean: Series = field(default_factory=lambda: Series(x=(), y=()))
    lag_max: Series = field(default_factory=lambda: Series(x=(), y=()))
    queues: Mapping[str, Series] = field(default_factory=dict)
    """Number of groups by place, over seconds."""
    publications: Sequence[Published] = ()
    reward: Series = field(default_factory=lambda: Series(x=(), y=()))
    validation: Mapping[str, Series] = field(default_factory=dict)
    length_mean: Series = field(default_factory=lambda: Series(x=(), y=()))
    length_max: Series = field(default_factory=lambda: Series(x=(), y=()))
    busiest_expert: Series = field(default_factory=lambda: Series(x=(), y=()))
    """Tokens of the busiest expert relative to an even spread, mean over the layers."""
    busiest_expert_worst: Series = field(default_factory=lambda: Series(x=(), y=()))
    """The same in the layer where it is largest."""
    episodes: EpisodeFigures = EpisodeFigures()
    pictures: Sequence[Picture] = ()
    """What an image policy drew, by step."""
    mismatch: Series = field(default_factory=lambda: Series(x=(), y=()))
    """Largest difference between the engine's and the trainer's log-probs on the same weights."""
    fates: Mapping[str, int] = field(default_factory=dict)
    regenerated: int = 0
    tail_s: Sequence[float] = ()
    """Seconds of the longest response of each step."""
    answer_s: Sequence[float] = ()
    """Mean seconds of a response of each step, if recorded."""
    ess: float | None = None
    """Mean effective sample size of the importance weights, as a share of the samples."""
    error: str = ""
    engine: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    missing: Sequence[str] = ()

    @property
    def least_explained(self) -> tuple[float, str] | None:
        """The smallest share of served elements that an engine's own tables explain, and which tensors they
        do not, or None if no publication has it.
        """
        known = [
            (p.explained_share, p.unexplained) for p in self.publications if p.explained_share is not None
        ]
        return min(known, default=None)

    @property
    def typical(self) -> Accounting | None:
        """The account without the first step if there is one, otherwise the whole account."""
        return (
            self.warm if self.warm is not None and self.warm.steps and self.warm.steady_s else self.accounting
        )

    @property
    def typical_time(self) -> str:
        """The part of the run that `typical` covers, as text."""
        return "without the first step" if self.typical is self.warm else "since the first version was served"


def data_of(files: RunFiles) -> RunData:
    """Return the numbers of a run, without its events if they are inconsistent or of another version."""
    off: Mapping[str, str] = files.summary.get("observers_off") or {}
    if off:
        lines = [f"the run switched off {name} after an error ({error})" for name, error in off.items()]
        # An account of a part of the run would look like one of the whole run.
        incomplete = "events.jsonl" in off or ACCOUNT in off
        files = replace(files, events=() if incomplete else files.events, missing=(*files.missing, *lines))
    try:
        found = _from_events(files.events) if files.events else {}
    except (AccountingError, KeyError) as error:
        why = (
            f"events.jsonl is invalid ({type(error).__name__}: {error}): no timeline, device-seconds, "
            "queues, weight updates"
        )
        files, found = replace(files, events=(), missing=(*files.missing, why)), {}

    summary, rows = files.summary, files.steps
    step_s = [float(row.data["timing_s/step"]) for row in rows if "timing_s/step" in row.data]
    steps = int(
        summary.get("steps") or max((row.step for row in rows), default=0) or len(found.get("step_ends", ()))
    )
    samples = float(summary.get("samples_trained") or 0)
    later = sum(step_s[1:])

    return RunData(
        name="/".join(files.path.resolve().parts[-2:]),
        path=files.path,
        status=str(summary.get("status") or "unfinished"),
        strategy=str(summary.get("strategy") or _configured_strategy(files.config) or "?"),
        max_lag=_first(summary.get("max_lag"), found.pop("max_lag", None)),
        steps=steps,
        wall_s=float(summary.get("wall_s") or (found["accounting"].wall_s if found else 0.0)),
        step_s=step_s,
        samples_per_s=samples * (len(step_s) - 1) / len(step_s) / later if later and samples else None,
        lag_share=_lag_share(rows),
        lag_mean=series_of(rows, f"{PREFIX}lag/mean"),
        lag_max=series_of(rows, f"{PREFIX}lag/max"),
        reward=series_of(rows, "critic/score/mean"),
        validation=_validation(files),
        length_mean=series_of(rows, "response_length/mean"),
        length_max=series_of(rows, "response_length/max"),
        busiest_expert=series_of(rows, "actor/moe/busiest_expert"),
        busiest_expert_worst=series_of(rows, "actor/moe/busiest_expert_worst_layer"),
        episodes=episode_figures(rows),
        pictures=files.pictures,
        mismatch=series_of(rows, f"{PREFIX}drift/max"),
        fates={fate: int(summary.get(f"groups_{fate}") or 0) for fate in FATES}
        if "steps" in summary  # otherwise not the run's own
        else found.pop("counted", {}),
        regenerated=int(summary.get("groups_regenerated") or 0),
        answer_s=series_of(rows, f"{PREFIX}bias/seconds/trained_mean").y,
        ess=_mean(series_of(rows, f"{PREFIX}off_policy/ess/all").y),
        error=str(summary.get("error") or ""),
        engine=files.engine,
        config=files.config,
        missing=files.missing,
        **{key: value for key, value in found.items() if key != "counted"},
    )


def _configured_strategy(config: Mapping[str, Any]) -> object:
    """Return the strategy in the config, for a run without a summary."""
    for key in ("trainer", "v1", "async_pipeline"):
        config = config.get(key) or {}
    return config.get("strategy")


def _first(*values: Any) -> int | None:
    return next((int(value) for value in values if value is not None), None)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _validation(files: RunFiles) -> Mapping[str, Series]:
    names = sorted({name for row in files.validations for name in row.data if name.startswith("val-core/")})
    return {name: found for name in names if (found := series_of(files.validations, name))}


def _lag_share(rows: Sequence[Any]) -> Mapping[int, float]:
    prefix = f"{PREFIX}lag/trajectory_share/"
    total: dict[int, float] = {}
    counted = 0
    for row in rows:
        shares = {name: value for name, value in row.data.items() if name.startswith(prefix)}
        counted += bool(shares)
        for name, share in shares.items():
            lag = int(name.removeprefix(prefix))
            total[lag] = total.get(lag, 0.0) + float(share)
    return {lag: total[lag] / counted for lag in sorted(total)}


def _from_events(records: Sequence[LogRecord]) -> dict[str, Any]:
    accountant = Accountant()
    state = accountant.state
    pools: dict[str, list[Span]] = {}
    queues: dict[str, list[tuple[float, float]]] = {}
    now = 0.0

    for record in records:
        if record.t > now:
            for pool, reason in accountant.doing().items():
                _extend(pools.setdefault(pool, []), now, record.t, reason)
            now = record.t
        before = state.group_counts
        accountant(record)
        if before != state.group_counts:
            for place, count in state.group_counts.items():
                queues.setdefault(place, []).append((record.t, float(count)))

    trained = [record for record in records if record.event == "TRAINED"]
    last = trained[-1].fields if trained else {}

    return {
        "accounting": accountant.account(),
        "warm": accountant.since_warm(),
        "max_lag": state.facts.get("max_lag"),
        "pools": pools,
        "roles": {role: spans for role in state.downstream if (spans := busy_intervals(records, role))},
        "home": state.home,
        "step_ends": {int(record.fields["step"]): record.t for record in trained},
        "tail_s": [
            float(record.fields["batch/tail_s"]) for record in trained if "batch/tail_s" in record.fields
        ],
        "queues": {
            place: Series(x=[t for t, _ in points], y=[n for _, n in points])
            for place, points in queues.items()
        },
        "publications": [_published(record) for record in records if record.event == "SERVED"],
        "counted": {fate: int(last.get(f"samples/{fate}", 0)) for fate in ("filtered", "expired", "failed")},
    }


def _published(record: LogRecord) -> Published:
    known = {
        name: float(record.fields.get(name, 0.0))
        for name in ("gather_s", "transfer_s", "load_s", "commit_s", "stall_s")
    }
    return Published(
        version=int(record.fields["version"]),
        t=record.t,
        replicas=max(1, int(record.fields.get("replicas", 1))),
        num_bytes=float(record.fields.get("bytes", 0)),
        explained_share=record.fields.get("explained_share"),
        unexplained=str(record.fields.get("unexplained", "")),
        **known,
    )


def _extend(spans: list[Span], start: float, end: float, what: str) -> None:
    if spans and spans[-1][2] == what and spans[-1][1] == start:
        start = spans.pop()[0]
    spans.append((start, end, what))


def changed_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> Sequence[tuple[str, str, str]]:
    """Return key, value in a and value in b of each setting that differs, except run names and paths."""
    left, right = _flat(a), _flat(b)
    keys = [key for key in [*left, *(key for key in right if key not in left)] if not _says_where(key)]
    return [
        (key, left.get(key, "not set"), right.get(key, "not set"))
        for key in keys
        if left.get(key) != right.get(key)
    ]


_WHERE = (
    "_dir",
    "_path",
    "path",
    "experiment_name",
    "project_name",
    "started_unix",
    "_file",
    "files",
    "port",
    "placement",
)

_WHICH = ("run", "identity", "async_strategy")
"""Keys that identify the run, or that repeat `trainer.v1.async_pipeline.strategy`."""


def _says_where(key: str) -> bool:
    """Return whether a setting names a place or a run instead of a behaviour."""
    return any(part.endswith(_WHERE) or part in _WHICH for part in key.split("."))


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        return {
            k: v
            for key, inner in value.items()
            for k, v in _flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
        }
    return {prefix: str(value)}
