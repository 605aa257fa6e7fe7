# SPDX-License-Identifier: Apache-2.0
"""The files of a real run that show its speed: `events.jsonl` and `settings.json`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...config.derived.scheduling import of_settings
from ...config.knobs.schema import AsyncPipelineConfig
from ...config.placement import Placement
from ...core.events import LogRecord
from ...errors import ConfigError
from ..run_directory import events_of_steps, read_events, why_it_never_began

SETTINGS = "settings.json"
ENDS = {
    "draw": ("dataloader", "OUTPUT"),
    "logp": ("logp", "RELEASE"),
    "ref_logp": ("ref_logp", "RELEASE"),
    "values": ("values", "RELEASE"),
    "advantage": ("reward", "OUTPUT"),
    "critic": ("critic", "RELEASE"),
    "update": ("train", "TRAINED"),
    "gather": ("param_update", "GATHERED"),
}
"""For each stage, the role that runs it and the event that ends it; it begins with the role's lease."""


@dataclass(frozen=True)
class RunLog:
    """A run's settings and events."""

    directory: Path
    settings: Mapping[str, Any]
    records: Sequence[LogRecord]

    @property
    def placement(self) -> Placement:
        """The run's placement."""
        return Placement.from_list(self.settings["placement"])

    @property
    def knobs(self) -> AsyncPipelineConfig:
        """The run's settings that decide its schedule."""
        return of_settings(self.settings)

    @cached_property
    def step_ends_s(self) -> list[float]:
        """Time of the end of each optimizer step."""
        return [record.t for record in self.records if record.event == "TRAINED"]

    @cached_property
    def lag_mean(self) -> float:
        """Mean lag of the trained trajectories, over all steps."""
        lags = [float(record.fields["lag/mean"]) for record in self.records if record.event == "TRAINED"]
        return sum(lags) / len(lags)

    @cached_property
    def groups(self) -> Sequence[LogRecord]:
        """The ANSWERED records, one per group, with columns of its responses' costs."""
        return [record for record in self.records if record.event == "ANSWERED"]

    @cached_property
    def warm_groups(self) -> Sequence[LogRecord]:
        """Groups dispatched after the first step was trained, when code is compiled and caches are full."""
        return [group for group in self.groups if begun_s(group) >= self.step_ends_s[0]]

    @cached_property
    def tokens(self) -> Mapping[int, float]:
        """Tokens that each step trained on, including prompts and observations."""
        of_group = {r.fields["key"]: tokens_of(r) for r in self.groups}
        batches = {r.fields["step"]: r.fields["keys"] for r in self.records if r.event == "ASSEMBLED"}
        return {step: sum(of_group[key] for key in keys) for step, keys in batches.items()}

    def stage(self, name: str) -> Mapping[int, float]:
        """Return the seconds of a stage of ENDS, `assemble` or `finish`, by step; empty if it did not run."""
        return dict(self._stages.get(name, {}))

    @cached_property
    def _stages(self) -> Mapping[str, Mapping[int, float]]:
        found: dict[str, dict[int, float]] = defaultdict(dict)
        for name, step, seconds in self._durations():
            found[name].setdefault(step, seconds)
        return found

    def _durations(self) -> Iterator[tuple[str, int, float]]:
        """Yield stage, step and seconds."""
        begun: dict[tuple[str, int], float] = {}
        ends = {end: name for name, end in ENDS.items()}
        for record in self.records:
            lane, step = (record.role, int(record.fields.get("lane", 0))), record.fields.get("step")

            if record.event in ("LEASE", "RESUME"):
                begun[lane] = record.t
            if lane not in begun or step is None:
                continue

            if (record.role, record.event) in ends:
                yield ends[record.role, record.event], int(step), record.t - begun[lane]
            elif record.event == "ASSEMBLED":
                yield "assemble", int(step), record.t - begun[lane]
            if (record.role, record.event) == ("train", "OUTPUT"):
                begun[lane] = record.t
            elif (record.role, record.event) == ("train", "FINISH"):
                yield "finish", int(step), record.t - begun[lane]


def read_run(directory: Path) -> RunLog:
    """Read a run's directory. Raises ConfigError if it is not one, or the run trained nothing."""
    settings, events = directory / SETTINGS, events_of_steps(directory)
    for path in (events, settings):
        if not path.is_file():
            why = why_it_never_began(directory) or "give the directory of a run, e.g. outputs/smoke/latest"
            raise ConfigError(f"{directory} has no {path.name}; {why}")
    try:
        run = RunLog(directory, json.loads(settings.read_text(encoding="utf-8")), read_events(events))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{directory} has files of another format: {error}; give a run's") from None
    if not run.groups or not run.step_ends_s:
        raise ConfigError(f"{events} has no finished group or no step; give a run that trained")
    return run


def begun_s(group: LogRecord) -> float:
    """Return when the prompt of an ANSWERED record was dispatched."""
    return group.t - float(group.fields["seconds"])


def tokens_of(group: LogRecord) -> float:
    """Return the tokens of an ANSWERED record, including prompts and observations."""
    return float(sum(sum(group.fields[name]) for name in ("prompt_tokens", "tokens", "observation_tokens")))
