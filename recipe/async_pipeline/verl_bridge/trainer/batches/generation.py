# SPDX-License-Identifier: Apache-2.0
"""Generate groups of responses, reject bad data, and assemble the batch of a step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from ....config.knobs.schema import AsyncPipelineConfig
from ....core.groups.bad_data import UNUSABLE_PROMPT, BadData, Flaw
from ....core.groups.items import Admission, Group, Prompt, PromptBatch, StepBatch, Trajectory
from ....core.groups.recall import Recall
from ....core.groups.scores import Score, unscored
from ....core.lag.token_ages import masked
from ....core.waits.deadline import within
from ....errors import RolloutError
from ....observe.run_directory.agent_output import FailedAttempt
from ...agent_loop.manager import PushAgentLoopManager
from ...calls.ray_calls import BlockingCalls
from ...reward.batch_scoring import score_batch
from ...store.sample_columns import PARTITION, TEACHER_IDS, TEACHER_LOG_PROBS
from ..reporting.sample_metrics import SampleMeters
from .data_rows import FLAW
from .prompt_source import PromptSource
from .verl_stages import VerlStages, own_copy


class Generation:
    """Generates groups, decides which of them are trained, and assembles batches."""

    def __init__(
        self,
        *,
        manager: PushAgentLoopManager,
        prompts: PromptSource,
        calls: BlockingCalls,
        stages: VerlStages,
        meters: SampleMeters,
        bad_data: BadData,
        knobs: AsyncPipelineConfig,
        temperature: float,
        filter_metric: str | None,
        reward_workers: Callable[[], Sequence[Any]],
        served: Callable[[], int],
        note: Callable[..., object],
        keep_output: Callable[[int, Sequence[FailedAttempt]], None],
    ) -> None:
        """`filter_metric` is the name of the metric that DAPO's filter compares, or None.

        `reward_workers` returns the workers that score whole batches. `served` returns the version that
        the rotation serves. `note(event, **fields)` logs an event of the stage `generate`.
        `keep_output(step, failed)` keeps what agents wrote, and may block.
        """
        self._manager, self._prompts, self._calls, self._stages = manager, prompts, calls, stages
        self._meters, self._bad_data, self._knobs = meters, bad_data, knobs
        self._temperature, self._filter_metric = temperature, filter_metric
        self._reward_workers, self._served, self._note = reward_workers, served, note
        self._keep_output = keep_output
        self._allowed = asyncio.Event()
        self._allowed.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Start no groups inside the context; started groups continue."""
        self._allowed.clear()
        try:
            yield
        finally:
            self._allowed.set()

    async def draw(self, admission: Admission) -> PromptBatch:
        """Return the next prompts of the dataset; the admission has their number."""
        while self._prompts.lacks(admission.prompts):
            self._prompts.add(await self._calls(self._prompts.draw))
        return PromptBatch(
            step=admission.step,
            prompts=self._prompts.deal(admission.prompts),
            admitted_version=admission.version,
        )

    async def generate(self, prompt: Prompt, recall: Recall) -> Group | None:
        """Return the finished group of a prompt, or None if it was recalled and has been given up.

        Raises any error of the rollout, and WaitTimeout if validation pauses generation for too long.
        """
        await within(self._allowed.wait(), self._calls.timeout_s, owner="generate", what="validation to end")
        if recall.verdict is not None:
            return None
        identity = self._prompts.identity(prompt.uid)
        refused = self._bad_data.refuse(identity)
        if refused is None and FLAW in prompt.payload:
            refused = self._bad_data.judge(
                prompt.uid, identity, [Flaw(UNUSABLE_PROMPT, prompt.payload[FLAW])]
            )
        if refused is not None:
            flaw, again = refused
            return Group(
                uid=prompt.uid, step=prompt.step, trajectories=(), flaw=flaw, again=again, payload=()
            )

        started = time.perf_counter()
        done = await self._manager.run_group(prompt.payload, recall, self._served())
        seconds = time.perf_counter() - started
        if done is None:
            self._meters.cancelled(seconds)
            return None

        group, facts = done
        if facts.failed:
            await self._calls(self._keep_output, prompt.step, facts.failed)
        self._note("ANSWERED", key=prompt.uid, seconds=round(seconds, 6), **facts.costs)
        trajectories = tuple(
            replace(one, seconds=seconds, filter_by=self._filter_by(one, info))
            for one, info in zip(group.trajectories, facts.reward_infos, strict=True)
        )
        self._meters.finished(prompt.uid, trajectories)
        self._meters.redundant(facts.redundant)

        flaw, again = self._bad_data.judge(prompt.uid, identity, facts.flaws) or ("", False)
        return replace(group, trajectories=trajectories, flaw=flaw, again=again)

    async def ask_teacher(self, group: Group) -> Group:
        """Return a finished group whose teacher's log-probs are in the sample store, or with a flaw."""
        keys = [one.key for one in group.trajectories]
        flaws = await self._manager.ask_teacher(keys)
        if not flaws:  # the group was counted when it was generated
            # Checkpoints have the columns that the group names.
            columns = [[*names, TEACHER_IDS, TEACHER_LOG_PROBS] for names in group.payload]
            return replace(group, taught=True, payload=columns)
        verdict = self._bad_data.judge(group.uid, self._prompts.identity(group.uid), flaws)
        assert verdict is not None, "no policy keeps such a group"
        return replace(group, flaw=verdict.why, taught=True)

    def rejects(self, group: Group) -> Literal["filtered", "failed"] | None:
        """Return why a finished group is not trained, or None if it is.

        A group with bad data has failed. A group whose responses all have the same metric is filtered (DAPO,
        arXiv 2503.14476), because their advantages are zero.
        """
        if group.flaw:
            return "failed"
        alike = len({t.filter_by for t in group.trajectories}) == 1
        filtered = self._filter_metric is not None and alike and len(group.trajectories) > 1
        return "filtered" if filtered else None

    async def discard(self, group: Group) -> None:
        """Free the samples of a group that is not trained."""
        self._meters.discarded(group.uid)
        if group.flaw and not group.taught:  # its samples were never stored
            return
        await self._calls(tq.kv_clear, keys=[t.key for t in group.trajectories], partition_id=PARTITION)

    async def assemble(self, step: int, groups: Sequence[Group]) -> StepBatch:
        """Return a batch of groups, in the order of their prompts, balanced over the training ranks."""
        ordered = tuple(sorted(groups, key=lambda g: self._prompts.place(g.uid)))
        if any(one.masked_before for group in ordered for one in group.trajectories):
            await self._calls(mask_stale_tokens, ordered, PARTITION)
        # Thousands of keys and tags: in a thread, so that they do not hold up the event loop.
        meta = await self._calls(_meta_of, ordered, self._temperature)

        timing = {}
        if not self._knobs.reward.while_generating:
            started = time.perf_counter()
            ordered = await self._score(ordered, meta)
            timing["reward"] = time.perf_counter() - started

        meta, metrics = await self._stages.balance(step, meta)
        return StepBatch(step=step, groups=ordered, payload=meta, metrics=metrics, timing_s=timing)

    async def _score(self, groups: Sequence[Group], meta: KVBatchMeta) -> tuple[Group, ...]:
        def score() -> list[float]:
            return score_batch(self._reward_workers(), own_copy(meta), self._knobs)

        rewards = iter(await self._calls(score))

        def with_rewards(group: Group) -> Group:
            found = (replace(t, reward=next(rewards)) for t in group.trajectories)
            return replace(group, trajectories=tuple(found))

        return tuple(with_rewards(group) for group in groups)

    def _filter_by(self, trajectory: Trajectory, info: Mapping[str, Any]) -> float | None:
        """Return the value of the filter metric, or None without a filter.

        A response without a score may lack the metric: the value is its default reward then. Raises
        RolloutError if the reward function did not return a number under that name.
        """
        metric = self._filter_metric
        if metric is None:
            return None
        value = trajectory.reward if metric == "reward" or unscored(info) else info.get(metric)
        number = Score.of(value).value
        if number is None:
            numbers = (name for name, one in info.items() if Score.of(one).value is not None)
            known = ", ".join(["reward", *numbers])
            raise RolloutError(
                "algorithm.filter_groups.metric must name a finite number that the reward function returns, "
                f"got {metric!r}, which is {'missing' if value is None else repr(value)[:80]}; choose one of "
                f"{known}"
            )
        return number


def _meta_of(groups: Sequence[Group], temperature: float) -> KVBatchMeta:
    """Return verl's handle to the samples of a batch."""
    trajectories = [t for group in groups for t in group.trajectories]
    return KVBatchMeta(
        partition_id=PARTITION,
        keys=[t.key for t in trajectories],
        tags=[dict(t.payload) for t in trajectories],
        extra_info={"temperature": temperature},
    )


COLUMN = "response_mask"


def mask_stale_tokens(groups: Iterable[Group], partition: str) -> None:
    """Set the mask of tokens that are too old for their step to 0, in the sample store. Blocks. Idempotent.

    The message queue decides which tokens these are (`core.lag.token_ages`). Only `response_mask` changes,
    which all stages of verl read; `loss_mask` stays as the rollout wrote it, and a checkpoint takes the mask
    from there.
    """
    for group in groups:
        ranges = {one.key: found for one in group.trajectories if (found := masked(one))}
        if ranges:
            _mask(ranges, partition)


def _mask(ranges: Mapping[str, Sequence[tuple[int, int]]], partition: str) -> None:
    keys = list(ranges)
    stored = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=[COLUMN])
    masks = [mask.clone() for mask in stored[COLUMN].unbind(0)]
    for mask, too_old in zip(masks, ranges.values(), strict=True):
        for start, end in too_old:
            mask[start:end] = 0
    column = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
    tq.kv_batch_put(
        keys=keys, partition_id=partition, fields=TensorDict({COLUMN: column}, batch_size=len(keys))
    )
