# SPDX-License-Identifier: Apache-2.0
"""Run the flow of a trainer with its subscribers, and write the summary at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.diagnosis import diagnose
from ...core.flow import AsyncTrainingFlow
from ...core.wait_graph import Wait, waits_of
from ...observe.event_file import EventFile
from ...observe.observers import ACCOUNT, LOST, OVERLAP, SELECTION, Observers
from ...observe.overlap import OverlapMeter
from ...observe.summary import write_atomically
from ...observe.table import closing, header
from ...observe.watchdog import Watchdog
from ...stages.custom import insert_custom_stages
from ..garbage import present_objects_frozen
from .insight_spans import InsightStates
from .insight_spans import is_enabled as is_insight_enabled
from .terminal import echo, say

if TYPE_CHECKING:
    from .async_trainer import AsyncPipelineTrainer

KEPT_RECORDS = 10_000
"""Number of events kept in memory; `events.jsonl` has all of them."""


async def run_flow(trainer: AsyncPipelineTrainer) -> None:
    """Train until the last step. Raises the first error of any stage, after writing the summary."""
    folder, knobs, schedule = trainer.folder, trainer.knobs, trainer.schedule
    observers = trainer.observers
    flow = trainer._flow = AsyncTrainingFlow(
        trainer=trainer,
        enable_async_rl=True,
        keep_records=KEPT_RECORDS,
        startup_s=lambda: max(0.0, time.time() - trainer.runtime.started_unix),
        guard=observers.subscriber,
    )

    insert_custom_stages(flow.graph, knobs.custom_stages)
    overlap = OverlapMeter()
    flow.log.subscribe(overlap, name=OVERLAP)
    flow.log.subscribe(trainer.accounts, name=ACCOUNT)
    if is_insight_enabled():
        flow.log.subscribe(InsightStates(trainer.calls.submit), name="the spans of RL-Insight")
    flow.fates.subscribe(trainer.prompts.settled)
    flow.fates.subscribe(observers.guard(SELECTION, trainer.meters.settled, lost=LOST[SELECTION]))

    watchdog = Watchdog(folder.path / "diagnosis.txt", stalled_after_s=knobs.faults.loop_stall_s, say=say)

    def expired(wait: Wait) -> str:
        diagnosis = diagnose(flow, wait)
        watchdog.tell(diagnosis)
        return diagnosis.cause

    waits_of().on_expiry = expired
    failure: BaseException | None = None
    with _events_of(folder.path, observers) as events, folder.ledger as ledger, watchdog:
        flow.log.subscribe(events, name="events.jsonl")
        flow.ledger.subscribe(ledger)
        steps = f"{schedule.first_step}..{schedule.last_step}"
        say(f"{knobs.strategy}, max_lag {schedule.max_lag}, steps {steps}")
        echo(header())
        trainer.report.begin()
        try:
            with present_objects_frozen():
                await flow.run()
            await trainer.calls(ledger.sync)
        except BaseException as error:
            failure = error
            raise
        finally:
            await trainer.report.close()
            await trainer.agent_loop_manager.close()
            await trainer.rollout_pool.close()
            overlap_s = overlap.seconds if observers.is_on(OVERLAP) else None
            summary = trainer.recorder.summarize(flow.result(), overlap_s, time.time(), failure)
            summary |= observers.value(ACCOUNT, trainer.accounts.summary, lost=LOST[ACCOUNT]) or {}
            if observers.off:
                summary["observers_off"] = dict(observers.off)
            summary["bad_data"] = trainer.bad_data.summary()
            write_atomically(folder.path / "summary.json", summary)
            for line in closing(summary):
                echo(line)


def _events_of(folder: Path, observers: Observers) -> EventFile:
    """Open the file of the run's events, which is an observer: unlike the ledger, the run does without it."""
    name = "events.jsonl"
    return EventFile(
        folder / name,
        on_failure=lambda error: observers.failed(
            name, error, lost="without later events, a trace, a report"
        ),
    )
