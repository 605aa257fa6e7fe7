# SPDX-License-Identifier: Apache-2.0
"""The part of the trainer that draws prompts, makes checkpoints, and goes on from one.

Whence it goes on was decided before Ray started (`resume`); here it is read.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from omegaconf import DictConfig
from ray.exceptions import RayError
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from ...config.scheduling import schedule_of
from ...config.schema import AsyncPipelineConfig
from ...core.bad_data import BadData
from ...core.clock import within
from ...core.flow_state import FlowState
from ...core.items import Group, Prompt, PromptBatch, Ticket
from ...core.schedule import Schedule
from ...errors import WaitTimeout
from ...observe.event_file import EventFile
from ...observe.run_files import rows_until, run_of, set_aside
from ...observe.summary import RunRecorder, one_line
from ..agent_loop.manager import PushAgentLoopManager
from ..agent_loop.partial_rollouts import WRITTEN_S, RecordedRequest, tokens_in
from ..run_config import runtime_of
from ..workers.policy_copy import PolicyCopy
from . import checkpoint_contents
from .checkpoint_contents import (
    ACTOR,
    CRITIC,
    REFERENCE,
    Checkpoints,
    Restored,
    RunState,
    Snapshot,
    kept_groups,
)
from .prompt_source import PromptSource
from .sample_metrics import SampleMeters
from .terminal import say

T = TypeVar("T")
PARTITION = "train"
CALL_THREADS = 16
"""Blocking calls that may be under way at once; each role has at most one, validation one more."""
NOT_WRITTEN = (
    "PytorchStreamWriter",
    "inline_container.cc",
    "iostream error",
    "No space left",
    "SafetensorError",
)
"""What torch and safetensors say of a disk that takes no more, in an error that is not an OSError."""


class ResumableTrainer(PPOTrainer):
    """Base of `AsyncPipelineTrainer`, which sets what is declared here."""

    run_dir: Path
    wait_timeout_s: float | None
    recorder: RunRecorder
    _meters: SampleMeters
    _bad_data: BadData
    _copies: dict[str, PolicyCopy]
    """Forward-only models that compute with published versions, by role."""
    trainer_mode: str
    """verl's name for the strategy; several of its methods ask whether this is `sync`."""
    rejects: Callable[[Group], Any]
    knobs: AsyncPipelineConfig
    schedule_class: ClassVar[type[Schedule] | None] = None
    """The schedule of a strategy that is a trainer, or None for the one that the strategy names."""

    agent_loop_manager: PushAgentLoopManager
    resumed: FlowState | None = None
    _restored: Restored | None = None

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.runtime = runtime_of(config)
        self._threads = ThreadPoolExecutor(CALL_THREADS, thread_name_prefix="verl-call")

    async def _call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run blocking verl code in a thread. Raises WaitTimeout: it did not return; the thread is left to
        itself.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        called = loop.run_in_executor(self._threads, partial(function, *args, **kwargs))
        name = getattr(function, "__name__", type(function).__name__)
        return await within(
            called, self.wait_timeout_s, owner=task.get_name(), what=f"the call {name} to return"
        )

    # Prompts.

    def _init_dataloader(self) -> None:
        """Whole batches, as verl's sync trainer draws them, so that both see the same prompts in one
        order.
        """
        mode, self.trainer_mode = self.trainer_mode, "sync"
        try:
            super()._init_dataloader()
        finally:
            self.trainer_mode = mode
        self.prompts = PromptSource(self._next_train_batch, self.train_dataloader)

    async def draw_prompts(self, ticket: Ticket) -> PromptBatch:
        while self.prompts.lacks(ticket.prompts):
            self.prompts.add(await self._call(self.prompts.draw))
        return PromptBatch(
            step=ticket.step, prompts=self.prompts.deal(ticket.prompts), admitted_version=ticket.version
        )

    async def restore_prompts(self, uids: Sequence[str]) -> Sequence[Prompt]:
        """Return them with what was generated for them so far, in their payload."""
        return self.prompts.found(uids)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of this process, once a checkpoint has been loaded."""
        trainer = self.config.trainer
        by_epochs = self.steps_per_epoch * trainer.total_epochs
        return schedule_of(
            self.knobs,
            strategy=self.schedule_class,
            batch=self.config.data.train_batch_size,
            first_step=1 if self.resumed is None else self.resumed.step + 1,
            last_step=int(min(self.total_training_steps, by_epochs)),
            old_logp=self.runtime.old_logp,
            validate_every=max(0, trainer.test_freq),
            validate_first=bool(trainer.get("val_before_train", True)),
            save_every=max(0, trainer.save_freq),
        )

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"run": self.runtime.run, "unix": round(time.time(), 3), **self.runtime.identity}

    def _load_checkpoint(self) -> None:
        """Called by verl once its workers are there."""
        self.global_steps = 0
        if self.runtime.resume_from is None:
            return
        self._restored = restored = checkpoint_contents.read(self.runtime.resume_from)
        state = restored.state
        self.resumed, self.global_steps = state.flow, state.flow.step
        self.actor_rollout_wg.load_checkpoint(
            local_path=str(restored.folder / ACTOR), del_local_after_load=False
        )
        if self.use_critic:
            self.critic_wg.load_checkpoint(
                local_path=str(restored.folder / CRITIC), del_local_after_load=False
            )
        if state.kl_coef is not None:
            self.kl_ctrl_in_reward.value = state.kl_coef
        self._bad_data.restore(state.meters["bad_data"])
        self.prompts.restore(state.prompts, restored.loader, restored.transcripts)
        groups = kept_groups(state)
        checkpoint_contents.put(groups, restored.samples, PARTITION)
        for group in groups:
            self._meters.finished(group.uid, group.trajectories)
        say(
            f"resumed from {restored.folder}: step {self.global_steps}, {len(groups)} finished groups, "
            f"{len(state.flow.in_flight())} prompts to be answered again"
        )

    def _load_reference(self) -> None:
        """Once the copies are there: the reference policy, if it is another one than the run began with."""
        if self._restored is not None and self._restored.state.reference is not None:
            copy = self._copies["ref_logp"]
            copy.group.load_reference(str(self._restored.folder / REFERENCE))
            copy.version = self._restored.state.reference

    # The files of the run.

    def _open_files(self) -> None:
        """Set aside, or go on in, what an earlier process has left in the run's directory."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        metrics, ledger = self.run_dir / "metrics.jsonl", self.run_dir / "ledger.jsonl"
        self._rows: list[dict[str, Any]] = []
        goes_on = self.resumed is not None and run_of(ledger) == self.runtime.run
        if self.resumed is not None:
            self._rows = rows_until(metrics, self.resumed.step) if goes_on else []
            set_aside(metrics)
            set_aside(self.run_dir / "events.jsonl")
            if not goes_on:
                set_aside(ledger)
        self._ledger = EventFile(ledger, append=goes_on)
        os.environ["VERL_FILE_LOGGER_PATH"] = str(metrics)

    def _repeat_rows(self) -> None:
        """Have the metrics file begin with what it held up to the checkpoint; other trackers have it
        already.
        """
        for row in self._rows:
            self.logger.log(data=row["data"], step=row["step"], backend=["file"])
        if self._restored is not None:
            self.recorder.restore(self._restored.state.meters["recorder"])
        self._rows, self._restored = [], None

    # Checkpoints.

    async def save(self, state: FlowState) -> bool:
        """False: the disk did not take it; the checkpoints before stay, and so does the run, unless that was
        its last.

        Raises CheckpointError: it could not be written to any disk.
        """
        snapshot = self._snapshot(state)
        snapshot = snapshot._replace(transcripts=await self._transcripts(state.in_flight()))
        try:
            folder = await self._call(self._checkpoints().write, snapshot)
        except Exception as error:
            if not is_full(error) or state.step == self.schedule.last_step:
                raise
            say(f"step {state.step} has no checkpoint, those before stay: {one_line(error)}")
            return False
        await self._call(
            self.checkpoint_callback.on_save,
            trainer=self,
            global_step=state.step,
            checkpoint_dir=str(folder),
            async_save=False,
        )
        return True

    def _snapshot(self, state: FlowState) -> Snapshot:
        groups = [group for group in state.finished() if self.rejects(group) is None]
        prompts, loader = self.prompts.state(state.in_flight(), [group.uid for group in state.finished()])
        reference = self.schedule.reference(state.step + 1)
        kept = RunState(
            flow=state,
            prompts=prompts,
            kept=tuple(group.uid for group in groups),
            # This step's own version is the first that is published again.
            reference=None if reference == state.step else reference,
            kl_coef=self.kl_ctrl_in_reward.value if self.config.algorithm.use_kl_in_reward else None,
            meters={"recorder": self.recorder.state(), "bad_data": self._bad_data.state()},
        )
        return Snapshot(kept, groups, loader, self.prompts.loader_state, {})

    async def _transcripts(self, in_flight: Sequence[str]) -> dict[str, list[list[RecordedRequest]]]:
        """What there is of them a moment later; of those that are finished by then, nothing, and they are
        answered anew.
        """
        try:
            found = await within(
                self.agent_loop_manager.transcripts(),
                2 * WRITTEN_S,
                owner="train",
                what="what was written so far",
            )
        except (WaitTimeout, RayError) as error:
            say(f"answers that are being written are not kept: {one_line(error)}")
            return {}
        # A prompt whose generation was not begun again still has what this process was resumed with.
        kept = {uid: found.get(uid) or self.prompts.resumed(uid) for uid in in_flight}
        return {uid: responses for uid, responses in kept.items() if tokens_in(responses)}

    def _checkpoints(self) -> Checkpoints:
        trainer = self.config.trainer
        kept = [
            trainer.get("max_actor_ckpt_to_keep"),
            *([trainer.get("max_critic_ckpt_to_keep")] if self.use_critic else []),
        ]
        return Checkpoints(
            root=Path(trainer.default_local_dir),
            run=self.runtime.run,
            identity=self.runtime.identity,
            keep=None if None in kept else max(kept),
            partition=PARTITION,
            save_models=self._save_models,
            sync_ledger=self._ledger.sync,
        )

    def _save_models(self, folder: Path, state: RunState) -> None:
        step = state.flow.step
        self.actor_rollout_wg.save_checkpoint(str(folder / ACTOR), None, step, max_ckpt_to_keep=None)
        if self.use_critic:
            self.critic_wg.save_checkpoint(str(folder / CRITIC), None, step, max_ckpt_to_keep=None)
        if state.reference is not None:
            self._copies["ref_logp"].group.save_reference(str(folder / REFERENCE))


def is_full(error: Exception) -> bool:
    """Is it the disk that is wrong, and not the program?"""
    if isinstance(error, OSError):
        return not isinstance(error, TimeoutError | ConnectionError)
    return any(text in str(error) for text in NOT_WRITTEN)
