# SPDX-License-Identifier: Apache-2.0
"""Write checkpoints, and load the models of the checkpoint that a run resumes from.

`checkpoint.resume` has chosen that checkpoint before Ray started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from ray.exceptions import RayError

from ...core.bad_data import BadData
from ...core.deadline import within
from ...core.flow_state import FlowState
from ...core.items import Group
from ...core.progress import while_it_progresses
from ...core.schedule import Schedule
from ...errors import WaitTimeout
from ...observe.event_file import EventFile
from ...observe.summary import RunRecorder, one_line
from ..agent_loop.manager import PushAgentLoopManager
from ..agent_loop.partial_rollouts import WRITTEN_S, RecordedRequest, tokens_in
from ..workers.policy_copy import PolicyCopy
from .calls import BlockingCalls
from .checkpoint_contents import (
    ACTOR,
    CRITIC,
    REFERENCE,
    Checkpoints,
    Restored,
    SavedRun,
    Snapshot,
    Unfinished,
    refuse_damage,
)
from .prompt_source import PromptSource
from .terminal import say
from .verl_stages import VerlStages

NOT_WRITTEN = (
    "PytorchStreamWriter",
    "inline_container.cc",
    "iostream error",
    "No space left",
    "SafetensorError",
)
"""Messages of torch and safetensors about a full disk, in errors that are not an OSError."""


class Checkpointing:
    """Writes checkpoints of the complete state of a run."""

    def __init__(
        self,
        *,
        run: str,
        identity: Mapping[str, Any],
        config: DictConfig,
        schedule: Schedule,
        calls: BlockingCalls,
        stages: VerlStages,
        actor_group: Any,
        critic_group: Any | None,
        copies: Mapping[str, PolicyCopy],
        prompts: PromptSource,
        manager: PushAgentLoopManager,
        bad_data: BadData,
        recorder: RunRecorder,
        ledger: EventFile,
        partition: str,
        rejects: Callable[[Group], Any],
        on_save: Callable[[int, str], object],
        stall_s: float | None,
    ) -> None:
        """`config` is verl's `trainer` section. `on_save(step, folder)` is called after each checkpoint.

        `stall_s`: see `faults.checkpoint_stall_s`.
        """
        self._stall_s = stall_s
        self._run, self._identity, self._config, self._schedule = run, identity, config, schedule
        self._calls, self._stages, self._copies = calls, stages, copies
        self._actor_group, self._critic_group = actor_group, critic_group
        self._prompts, self._manager, self._bad_data = prompts, manager, bad_data
        self._recorder, self._ledger, self._partition = recorder, ledger, partition
        self._rejects, self._on_save = rejects, on_save

    async def save(
        self, state: FlowState, *, models_read: Callable[[], object], all_read: Callable[[], object]
    ) -> bool:
        """Write a checkpoint; see `PipelineTrainer.save`. It may take any time while it progresses.

        Returns False if the disk is full: earlier checkpoints stay and the run continues. Raises that
        error at the last step, and any other error, such as CheckpointError for invalid contents, or
        WaitTimeout if no byte was added for `faults.checkpoint_stall_s`.
        """
        snapshot, step = self._snapshot(state), state.step
        try:
            part = await self._calls(self._checkpoints().begin, step)
            folder = await while_it_progresses(
                self._write(part, snapshot, models_read, all_read),
                lambda: self._calls.without_deadline(part.progress),
                self._stall_s,
                owner="train",
                what=f"the next byte of {part.folder}",
                tell=lambda done, seconds: say(
                    f"checkpoint of step {step}: {done / 2**30:.1f} GiB written or hashed "
                    f"in {seconds:.0f} s, {part.folder}"
                ),
            )
        except Exception as error:
            if not is_full(error) or step == self._schedule.last_step:
                raise
            say(f"step {step} has no checkpoint, those before stay: {one_line(error)}")
            return False
        await self._calls(self._on_save, step, str(folder))
        return True

    async def _write(
        self,
        part: Unfinished,
        snapshot: Snapshot,
        models_read: Callable[[], object],
        all_read: Callable[[], object],
    ) -> Path:
        """Write all files, the models and the rest at the same time, and publish them. Returns the folder."""
        checkpoints, state = self._checkpoints(), snapshot.state

        async def write_models() -> None:
            await self._calls.without_deadline(checkpoints.write_models, part, state)
            models_read()

        async def write_rest() -> None:
            transcripts = await self._partial_rollouts(state.flow.in_flight())
            whole = snapshot._replace(transcripts=transcripts)
            await self._calls.without_deadline(checkpoints.write_rest, part, whole)

        try:
            # Both end before the folder is deleted after a failure.
            for error in await asyncio.gather(write_models(), write_rest(), return_exceptions=True):
                if error is not None:
                    raise error
            all_read()
            return await self._calls.without_deadline(checkpoints.publish, part, state.flow.step)
        except Exception:
            await self._calls.without_deadline(part.abandon)
            raise
        except asyncio.CancelledError:
            # Its threads may still write; the next process removes what they leave.
            self._calls.submit(part.abandon)
            raise

    def _snapshot(self, state: FlowState) -> Snapshot:
        groups = [group for group in state.finished() if self._rejects(group) is None]
        finished = [group.uid for group in state.finished()]
        prompts, loader = self._prompts.state(state.in_flight(), finished)
        reference = self._schedule.reference(state.step + 1)
        kept = SavedRun(
            flow=state,
            prompts=prompts,
            kept=tuple(group.uid for group in groups),
            # The version of this step is published again when the run resumes.
            reference=None if reference == state.step else reference,
            kl_coef=self._stages.kl_coefficient(state.step),
            meters={"recorder": self._recorder.state(), "bad_data": self._bad_data.state()},
        )
        return Snapshot(kept, groups, loader, self._prompts.loader_state, {})

    async def _partial_rollouts(self, in_flight: Sequence[str]) -> dict[str, list[list[RecordedRequest]]]:
        """Return the requests that agent loop workers have recorded so far, by prompt.

        Prompts that finish meanwhile are missing; a resumed run generates them again.
        """
        try:
            found = await within(
                self._manager.transcripts(),
                2 * WRITTEN_S,
                owner="train",
                what="the partial responses",
            )
        except (WaitTimeout, RayError) as error:
            say(f"partial responses are not kept: {one_line(error)}")
            return {}
        # A prompt whose generation has not begun in this process still has its requests from the checkpoint.
        kept = {uid: found.get(uid) or self._prompts.resumed(uid) for uid in in_flight}
        return {uid: responses for uid, responses in kept.items() if tokens_in(responses)}

    def _checkpoints(self) -> Checkpoints:
        limits = [self._config.get("max_actor_ckpt_to_keep")]
        if self._critic_group is not None:
            limits.append(self._config.get("max_critic_ckpt_to_keep"))
        return Checkpoints(
            root=Path(self._config.default_local_dir),
            run=self._run,
            identity=self._identity,
            keep=None if None in limits else max(limits),
            partition=self._partition,
            save_models=self._save_models,
            sync_ledger=self._ledger.sync,
        )

    def _save_models(self, folder: Path, state: SavedRun) -> None:
        step = state.flow.step
        self._actor_group.save_checkpoint(str(folder / ACTOR), None, step, max_ckpt_to_keep=None)
        if self._critic_group is not None:
            self._critic_group.save_checkpoint(str(folder / CRITIC), None, step, max_ckpt_to_keep=None)
        if state.reference is not None:
            self._copies["ref_logp"].save(state.reference, folder / REFERENCE)


def load_models(restored: Restored, actor_group: Any, critic_group: Any | None) -> None:
    """Load the trained models of a checkpoint. Blocks. Raises CheckpointError if their files are damaged."""
    folder = restored.folder
    refuse_damage(folder, actor_group.damage(str(folder), ACTOR))
    if critic_group is not None:
        refuse_damage(folder, critic_group.damage(str(folder), CRITIC))
    actor_group.load_checkpoint(local_path=str(restored.folder / ACTOR), del_local_after_load=False)
    if critic_group is not None:
        critic_group.load_checkpoint(local_path=str(restored.folder / CRITIC), del_local_after_load=False)


def load_reference(restored: Restored, copy: PolicyCopy) -> None:
    """Load the reference policy, unless it is still the initial one. Blocks.

    Raises CheckpointError if its files are damaged.
    """
    if restored.state.reference is not None:
        refuse_damage(restored.folder, copy.group.damage(str(restored.folder), REFERENCE))
        copy.group.load_reference(str(restored.folder / REFERENCE))
        copy.version = restored.state.reference


def is_full(error: Exception) -> bool:
    """Return whether the disk, not the program, caused the error."""
    if isinstance(error, OSError):
        return not isinstance(error, TimeoutError | ConnectionError)
    return any(text in str(error) for text in NOT_WRITTEN)
