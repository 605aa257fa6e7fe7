# SPDX-License-Identifier: Apache-2.0
"""In which order a message queue takes groups, found out by using it."""

from __future__ import annotations

from recipe.async_pipeline.core.groups.items import Group, Prompt, Trajectory
from recipe.async_pipeline.core.groups.message_queue import MessageQueue
from recipe.async_pipeline.core.groups.recall import Recall
from recipe.async_pipeline.core.groups.untrained_groups import Order
from recipe.async_pipeline.core.lag.staleness import Versions
from recipe.async_pipeline.core.waits.clock import run_virtual


def serve_first(versions: Versions) -> None:
    versions.advance_gathered(0)
    versions.advance_served(0)


def admit_all(queue: MessageQueue) -> list[str]:
    """Draw all prompts that may be drawn; returns their uids."""
    uids: list[str] = []
    while queue.room():
        admission = run_virtual(queue.next_admission())
        for _ in range(admission.prompts):
            uids.append(f"{len(uids)}")
            queue.enter(Prompt(uid=uids[-1], step=admission.step), admission.version)
    return uids


def finish(queue: MessageQueue, uid: str) -> None:
    one = Trajectory(key=uid, first_version=0, last_version=0, num_tokens=1)
    queue.arrive(group := Group(uid=uid, step=1, trajectories=(one,)))
    queue.put(group)


def order_of(queue: MessageQueue, versions: Versions) -> Order:
    """Finish the groups that were drawn last; returns the order in which a step takes groups."""
    serve_first(versions)
    for uid in admit_all(queue)[-queue.batch :]:
        finish(queue, uid)
    return "drawn" if queue.take(1) is None else "finished"


def recall_of_a_straggler(queue: MessageQueue, versions: Versions) -> Recall:
    """Return the recall of the first group, when a step could take the groups after it."""
    serve_first(versions)
    first, *others = admit_all(queue)
    recall = queue.watch(first)
    for uid in others:
        finish(queue, uid)
    queue.take(1)
    return recall
