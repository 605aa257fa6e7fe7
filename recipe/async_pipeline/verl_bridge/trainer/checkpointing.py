# SPDX-License-Identifier: Apache-2.0
"""Write checkpoints, and load the models of the checkpoint that a run resumes from.

`checkpoint.resume` has chosen that checkpoint before Ray started.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs
from omegaconf import DictConfig
from ray.exceptions import RayError

from ...checkpoint.store import refuse_damage
from ...core.flow_state import FlowState
from ...core.groups.bad_data import BadData
from ...core.groups.items import Group
from ...core.schedule import Schedule
from ...core.waits.deadline import within
from ...core.waits.progress import while_it_progresses
from ...errors import WaitTimeout
from ...observe.causes import one_line
from ...observe.observers import Observers
from ...observe.run_directory.event_file import EventFile
from ...observe.run_directory.summary import RunRecorder
from ...observe.trackers import ServiceCalls
from ..agent_loop.manager import PushAgentLoopManager
from ..agent_loop.tokens.partial_rollouts import WRITTEN_S
from ..calls.ray_calls import BlockingCalls, cause_of
from ..store.sample_store import WriteShard, note
from ..workers.policy_copy import PolicyCopy
from .batches.prompt_source import PromptSource
from .batches.verl_stages import VerlStages
from .checkpoint_contents import (
    ACTOR,
    CRITIC,
    REFERENCE,
    SAMPLES,
    TRANSCRIPTS,
    Checkpoints,
    Restored,
    SavedRun,
    Snapshot,
    Unfinished,
)
from .reporting.terminal import say

FULL = (errno.ENOSPC, errno.EDQUOT)
SAYS_FULL = tuple(text for number in FULL for text in (os.strerror(number), f"os error {number}"))
"""What a library, or the text of an error from another process, contains if the disk is full."""
MAY_PASS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
"""Errors of a file system on a network that the next checkpoint may not meet."""
NOT_WRITTEN = ("PytorchStreamWriter", "inline_container.cc", "iostream error")
"""Messages of torch about a file that could not be written, without the reason."""
LEAST_BYTES = 64 << 20
"""Free bytes of a file system below which such a message is due to a full disk."""


class Checkpointing:
    """Writes checkpoints of the complete state of a run."""

    def __init__(
        self,
        *,
        run: str,
        identity: Mapping[str, Any],
        epoch: int,
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
        observers: Observers,
        patience_s: float,
        stall_s: float | None,
    ) -> None:
        """`config` is verl's `trainer` section. `on_save(step, folder)` is called after each checkpoint
        and is one of the observers; the next checkpoint waits for it for at most `patience_s`.

        `stall_s`: see `faults.checkpoint_stall_s`.
        """
        self._stall_s, self._full = stall_s, False
        self._run, self._identity, self._epoch = run, identity, epoch
        self._config, self._schedule = config, schedule
        self._calls, self._stages, self._copies = calls, stages, copies
        self._actor_group, self._critic_group = actor_group, critic_group
        self._prompts, self._manager, self._bad_data = prompts, manager, bad_data
        self._recorder, self._ledger, self._partition = recorder, ledger, partition
        self._rejects, self._on_save = rejects, on_save
        self._deliver = ServiceCalls(
            "the checkpoint callback",
            observers,
            lost="without calls of it",
            patience_s=patience_s,
            stuck_s=math.inf,  # it may upload for hours
        )

    async def save(
        self, state: FlowState, *, models_read: Callable[[], object], all_read: Callable[[], object]
    ) -> bool:
        """Write a checkpoint; see `PipelineTrainer.save`. It may take any time while it progresses.

        Returns False if the disk is full, or fails for a moment: earlier checkpoints stay and the run
        continues. Raises that error at the last step, and any other error, such as CheckpointError for
        invalid contents, or WaitTimeout if no byte was added for `faults.checkpoint_stall_s`.
        """
        snapshot, step = self._snapshot(state), state.step
        self._full = False
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
            full = is_full(error, self._full)
            passes = full or getattr(cause_of(error), "errno", None) in MAY_PASS
            if full and step == self._schedule.last_step:  # a library may not have said so
                reason = f"{os.strerror(errno.ENOSPC)} for the checkpoint of step {step}"
                raise OSError(errno.ENOSPC, reason) from error
            if not passes or step == self._schedule.last_step:
                raise
            lacks = "has no checkpoint, because the disk is full"  # the soak waits for this line
            say(
                f"step {step} {lacks if full else lacks.replace('is full', 'fails')}; those before stay, and "
                f"another step is tried soon: {one_line(error)}"
            )
            return False
        # It is published: what happens here ends no run.
        await self._calls.without_deadline(self._deliver, partial(self._on_save, step, str(folder)))
        return True

    def close(self) -> None:
        """Repeat a call of `on_save` that failed, and tell the user if it fails again. Blocks."""
        self._deliver.close()

    async def _write(
        self,
        part: Unfinished,
        snapshot: Snapshot,
        models_read: Callable[[], object],
        all_read: Callable[[], object],
    ) -> Path:
        """Write all files and publish them; returns the folder.

        Training may continue once the models are written and the storage units have noted the samples. The
        owners of samples and transcripts write them then: their bytes do not pass through this process.
        """
        checkpoints, state = self._checkpoints(), snapshot.state

        async def write_models() -> None:
            await self._calls.without_deadline(checkpoints.write_models, part, state)
            models_read()

        noting = asyncio.ensure_future(self._transcripts(state))
        try:
            _, samples = await _all_ended(write_models(), self._calls(note, snapshot.groups, self._partition))
            all_read()
            shards = await self._write_shards(part, {SAMPLES: samples, TRANSCRIPTS: await noting})
            whole = snapshot._replace(state=structs.replace(state, shards=shards))
            await self._calls.without_deadline(checkpoints.write_rest, part, whole)
            return await self._calls.without_deadline(checkpoints.publish, part, state.flow)
        except Exception:
            # Before its files are deleted.
            self._full = await self._calls.without_deadline(no_room, part.folder)
            await self._calls.without_deadline(part.abandon)
            raise
        except asyncio.CancelledError:
            # Its threads may still write; the next process removes what they leave.
            self._calls.submit(part.abandon)
            raise
        finally:
            noting.cancel()

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
        return Snapshot(kept, groups, loader, self._prompts.loader_state)

    async def _transcripts(self, state: SavedRun) -> list[WriteShard]:
        """Have agent loop workers note the requests that they have recorded so far.

        Prompts that finish meanwhile are missing; a resumed run generates them again.
        """
        try:
            return await within(
                self._manager.note_transcripts(state.flow.in_flight(), state.flow.step),
                2 * WRITTEN_S,
                owner="train",
                what="the partial responses",
            )
        except (WaitTimeout, RayError) as error:
            say(f"partial responses are not kept: {one_line(error)}")
            return []

    async def _write_shards(
        self, part: Unfinished, writers: Mapping[str, Sequence[WriteShard]]
    ) -> dict[str, list[str]]:
        """Have the owners write their shards; returns the names by contents. The caller bounds the wait.

        Raises CheckpointError if a file is not where this process sees it.
        """
        names = {
            what: [f"{what}/rank_{rank}" for rank in range(len(owners))] for what, owners in writers.items()
        }
        writing = [
            write(str(part.folder), name)
            for what, owners in writers.items()
            for write, name in zip(owners, names[what], strict=True)
        ]
        written = [entry for entries in await _all_ended(*writing) for entry in entries]
        await self._calls.without_deadline(part.add, written)
        return names

    def _checkpoints(self) -> Checkpoints:
        limits = [self._config.get("max_actor_ckpt_to_keep")]
        if self._critic_group is not None:
            limits.append(self._config.get("max_critic_ckpt_to_keep"))
        return Checkpoints(
            root=Path(self._config.default_local_dir),
            run=self._run,
            identity=self._identity,
            epoch=self._epoch,
            keep=None if None in limits else max(limits),
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


async def _all_ended(*work: Awaitable[Any]) -> list[Any]:
    """Return all results once all have ended: no one writes into a folder that is deleted after a failure.

    Raises the first error.
    """
    ended = await asyncio.gather(*work, return_exceptions=True)
    for one in ended:
        if isinstance(one, BaseException):
            raise one
    return ended


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


def is_full(error: BaseException, had_no_room: bool = False) -> bool:
    """Return whether a full disk, or a full quota, caused the error.

    `had_no_room`: whether the file system was full when it was raised, because some messages of torch lack
    the reason.
    """
    cause = cause_of(error)
    if isinstance(cause, OSError) and cause.errno is not None:
        return cause.errno in FULL
    text = str(cause)
    if any(full in text for full in SAYS_FULL):
        return True
    return had_no_room and any(failed in text for failed in NOT_WRITTEN)


def is_of_disk(error: BaseException) -> bool:
    """Return whether a disk caused the error, whatever its reason, and not another process."""
    cause = cause_of(error)
    if isinstance(cause, OSError):
        return not isinstance(cause, TimeoutError | ConnectionError)
    return is_full(error, True)


def no_room(folder: Path) -> bool:
    """Return whether the file system of a folder has no room left. False if the system does not report it."""
    try:
        return shutil.disk_usage(folder).free < LEAST_BYTES
    except OSError:
        return False
