# SPDX-License-Identifier: Apache-2.0
"""Measure the samples of each step: their lag, their distance to the policy, and their selection bias."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf

from ....core.groups.fates import Fate, Settlement
from ....core.groups.items import StepBatch, Trajectory
from ....core.groups.scores import Score
from ....core.lag.token_ages import masked, oldest_trained
from ....observe.observers import FILE_ATTEMPTS, Observers
from ....observe.run_directory.run_files import set_aside
from ....observe.samples import selection_bias
from ....observe.samples.drift import DriftMeter, PrecisionCheck, bound_of
from ....observe.samples.off_policy import Columns, OffPolicyMeter
from ...agent_loop.episodes.redundancy import Redundant
from ...rules.diffusers_rules import draws_images

SELECTION: Mapping[Fate, selection_bias.ResponseFate] = {
    "trained": "trained",
    "filtered": "filtered",
    "expired": "dropped",
    "failed": "dropped",
}
"""The fate of a prompt to the fate of its responses in the selection metrics."""
FETCHED_TOKENS = 1 << 20
"""Tokens whose columns are fetched from the sample store together: 12 to 20 MB."""


class SampleMeters:
    """The meters of a run. Call all methods but `distances` on the event loop."""

    def __init__(self, config: DictConfig, max_lag: int) -> None:
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        self._max_lag = max_lag
        self._clip_low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
        self._clip_high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
        self._responses = int(rollout.n)
        # In bypass mode both columns are equal, and every ratio is 1.
        bypassed = bool(OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"))
        measurable = rollout.calculate_log_probs and not bypassed
        self._log_probs = ["rollout_log_probs", "old_log_probs"] if measurable else []
        by_response = OmegaConf.select(config, "algorithm.rollout_correction.rollout_is") == "sequence"
        self.share = f"off_policy/{'trajectory_ess' if by_response else 'ess'}/all"
        """The metric of the effective sample size of a step: of the weights that the correction has."""
        self._drift_bound = bound_of(
            rollout.get("dtype"), OmegaConf.select(actor, "fsdp_config.mixed_precision.param_dtype")
        )
        self._precision: PrecisionCheck | None = None
        if bypassed and draws_images(config) and actor.ppo_mini_batch_size == config.data.train_batch_size:
            of_trainer = OmegaConf.select(actor, "fsdp_config.mixed_precision.param_dtype")
            clip = float(min(self._clip_low, self._clip_high))
            self._precision = PrecisionCheck(str(rollout.get("dtype")), str(of_trainer), clip)
        self._drifts = False
        """Whether the last step drifted."""
        self._selection = selection_bias.SelectionMeter()
        self._undecided: dict[str, tuple[Trajectory, ...]] = {}
        """Finished responses to prompts without a fate, by prompt."""

    def finished(self, uid: str, trajectories: tuple[Trajectory, ...]) -> None:
        """Count the finished responses to a prompt; their fate is not known yet."""
        self._undecided[uid] = trajectories
        self._record("finished", trajectories)

    def stored(self) -> int:
        """Return the rows in the sample store that no step has trained. May be called from any thread."""
        return sum(len(trajectories) for trajectories in list(self._undecided.values()))

    def settled(self, settled: Settlement) -> None:
        """Count the responses to prompts that have a fate. Called by the register of fates."""
        groups = {group.uid: group.trajectories for group in settled.groups}
        for uid in settled.uids:
            finished = self._undecided.pop(uid, ())
            self._record(SELECTION[settled.fate], groups.get(uid, finished))

    def discarded(self, uid: str) -> None:
        """Count the responses to a prompt as dropped, unless they are already counted with its fate."""
        self._record("dropped", self._undecided.pop(uid, ()))

    def cancelled(self, seconds: float) -> None:
        """Count responses to one prompt that were cancelled `seconds` after they were requested.

        Their number of tokens and their reward are not known.
        """
        for _ in range(self._responses):
            self._selection.record("dropped", seconds=seconds)

    def redundant(self, episodes: Iterable[Redundant]) -> None:
        """Count episodes that their groups did not need."""
        for one in episodes:
            self._selection.record("redundant", **one._asdict())

    def selection(self) -> tuple[dict[str, float], str | None]:
        """Return metrics of recent samples, and a warning if the trained ones are a biased selection."""
        return self._selection.metrics(), self._selection.warning()

    def _record(self, fate: selection_bias.ResponseFate, trajectories: Iterable[Trajectory]) -> None:
        for one in trajectories:
            self._selection.record(
                fate, tokens=one.num_tokens, turns=one.turns, seconds=one.seconds, reward=one.reward
            )

    def distances(self, batch: StepBatch) -> tuple[dict[str, float], str | None]:
        """Return metrics of the lag and the off-policy distance of a batch, and a warning if the trainer does
        not see the tokens that the engine saw; the same turn is reported once. Blocks on the sample store.
        """
        meter = OffPolicyMeter(
            trainer_version=batch.step - 1,
            max_lag=self._max_lag,
            clip_low=self._clip_low,
            clip_high=self._clip_high,
        )
        formed = [group for group in batch.groups if group.counts.get("constrained")]
        with_forms = {t.key for group in formed for t in group.trajectories}
        drift = DriftMeter(batch.step - 1, self._drift_bound, with_forms)
        trajectories = {t.key: t for group in batch.groups for t in group.trajectories}
        # verl pads a batch with rows to make it divisible by the number of ranks.
        keys = [key for key in batch.payload.keys if key in trajectories]
        for part in _parts(keys, [trajectories[key].num_tokens for key in keys]):
            some, columns = (
                [trajectories[key] for key in part],
                self._columns(part, batch.payload.partition_id),
            )
            meter.add(*_trained(some, columns))
            drift.add(some, columns)
        clipped = None if self._precision is None else self._precision.warning(batch)
        return {**meter.metrics(), **drift.metrics()}, clipped or self._once(drift.warning())

    def _once(self, warning: str | None) -> str | None:
        """Return the warning after a step without one."""
        reported, self._drifts = self._drifts, warning is not None
        return None if reported else warning

    def _columns(self, keys: list[str], partition: str) -> Columns:
        names = ["loss_mask", *self._log_probs]
        data = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=names)
        rows = {name: list(data[name].unbind()) for name in names}
        flat = {name: torch.cat(found).float().numpy() for name, found in rows.items()}
        lengths = {name: [len(row) for row in found] for name, found in rows.items()}
        if any(found != lengths["loss_mask"] for found in lengths.values()):
            raise ValueError(f"the columns {', '.join(names)} of a batch have different lengths")
        return Columns(
            np.array(lengths["loss_mask"]),
            flat["loss_mask"],
            flat.get("rollout_log_probs"),
            flat.get("old_log_probs"),
        )


def _trained(trajectories: list[Trajectory], columns: Columns) -> tuple[list[Trajectory], Columns]:
    """Return what is left without tokens that are too old, and without responses that have no others."""
    if not any(one.masked_before for one in trajectories):
        return trajectories, columns
    mask, ends = columns.mask.copy(), np.cumsum(columns.lengths)
    kept = np.array([oldest_trained(one) is not None for one in trajectories])
    for one, end, length in zip(trajectories, ends, columns.lengths, strict=True):
        for first, after in masked(one):
            mask[end - length + first : end - length + after] = 0
    tokens = np.repeat(kept, columns.lengths)
    rollout, old = columns.rollout_log_probs, columns.old_log_probs
    return [one for one, keep in zip(trajectories, kept, strict=True) if keep], Columns(
        columns.lengths[kept],
        mask[tokens],
        None if rollout is None else rollout[tokens],
        None if old is None else old[tokens],
    )


def _parts(keys: Sequence[str], tokens: Sequence[int]) -> Iterator[list[str]]:
    """Yield the keys in parts of about FETCHED_TOKENS tokens."""
    part: list[str] = []
    held = 0
    for key, count in zip(keys, tokens, strict=True):
        part.append(key)
        held += count
        if held >= FETCHED_TOKENS:
            yield part
            part, held = [], 0
    if part:
        yield part


def numbers_or_text(columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return columns that hold only numbers and None, or only text and None.

    verl averages a column unless its first value is a text. A column with any other value becomes text, of
    which verl makes no metric.
    """
    return {name: _numbers(values) or _texts(values) for name, values in columns.items()}


def _numbers(values: Sequence[Any]) -> list[float | None] | None:
    """Return the values as numbers, or None if one of them is none. NaN and infinity are numbers here."""
    found = [
        value if value is None or isinstance(value, float) else Score.of(value).value for value in values
    ]
    lost = any(one is None and value is not None for one, value in zip(found, values, strict=True))
    return None if lost else found


def _texts(values: Sequence[Any]) -> list[str | None]:
    return [None if value is None else str(value) for value in values]


def file_writer(
    observers: Observers, write: Callable[..., object], folder: str, started_unix: float
) -> Callable[..., None]:
    """Return verl's `_write_generations` without errors: it observes a run, and takes any value.

    A file from before this process started is set aside.
    """

    def write_any(
        inputs: Any, outputs: Any, gts: Any, scores: Any, columns: Mapping[str, Any], step: int
    ) -> None:
        columns = {name: for_json(values) for name, values in columns.items()}
        before = Path(folder) / f"{step}.jsonl"
        if before.exists() and before.stat().st_mtime < started_unix:
            set_aside(before)
        write(inputs, outputs, for_json(gts), scores, columns, folder, step)

    return observers.guard(
        f"the files in {folder}", write_any, lost="without further ones", attempts=FILE_ATTEMPTS
    )


def for_json(values: Sequence[Any]) -> list[Any]:
    """Return the values, each that JSON cannot represent as its text."""
    return [_for_json(value) for value in values]


def _for_json(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return str(value)
    return value
