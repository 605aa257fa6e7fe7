# SPDX-License-Identifier: Apache-2.0
"""Describe why a pipeline makes no progress: what each stage waits for, its state, and the last events.

`diagnose` only reads state in memory, so it may be called at any time on the loop. It is called when the
deadline of a wait passes, before the stages are stopped.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..channel import Channel
from .wait_graph import Wait, cycle_in, waits_of

if TYPE_CHECKING:
    from ..flow import AsyncTrainingFlow
    from ..stage import RoleStateMachine

LAST_EVENTS = 30


class Diagnosis(NamedTuple):
    """The result of a diagnosis."""

    cause: str
    """One line."""
    text: str
    """All paragraphs."""


class _Owner(NamedTuple):
    waits: tuple[Wait, ...]
    holders: tuple[str, ...]
    """Owners any one of which can end this wait; empty if something outside the pipeline can end it."""


def diagnose(flow: AsyncTrainingFlow, expired: Wait | None = None) -> Diagnosis:
    """Diagnose a flow; call it on the flow's loop. `expired`: the wait whose deadline has passed."""
    now = asyncio.get_running_loop().time()
    owners = _owners()
    graph = {name: owner.holders for name, owner in owners.items() if owner.holders}
    cause = _cause(flow, owners, graph, expired, now)
    paragraphs = (
        ("cause", [cause]),
        ("waits", _waits(owners, now)),
        ("roles", [f"{_state(m, flow)}{_item(m)}" for m in flow.machines]),
        ("pools", [] if flow.pools is None else [flow.pools.get(name).describe() for name in flow.pools]),
        (
            "channels",
            [
                f"{ch.name}: {len(ch)} of {ch.capacity}{', closed' if ch.closed else ''}"
                for ch in _channels(flow.machines)
            ],
        ),
        ("queue and versions", _counts(flow)),
        (f"last {LAST_EVENTS} events", [str(r.as_dict()) for r in flow.log.records[-LAST_EVENTS:]]),
    )
    return Diagnosis(
        cause,
        "\n\n".join("\n  ".join([f"{title}:", *(lines or ["none"])]) for title, lines in paragraphs) + "\n",
    )


def _owners() -> dict[str, _Owner]:
    by_name: dict[str, list[Wait]] = defaultdict(list)
    for wait in waits_of().open:
        by_name[wait.owner].append(wait)
    found = {}
    for name, waits in by_name.items():
        named = [wait.holders().names for wait in waits]
        # One wait that something outside the pipeline can end is enough to continue.
        holders = {holder for names in named for holder in names} if all(named) else set()
        found[name] = _Owner(tuple(waits), tuple(sorted(holders - {name} or holders)))
    return found


def _cause(
    flow: AsyncTrainingFlow,
    owners: Mapping[str, _Owner],
    graph: Mapping[str, Sequence[str]],
    expired: Wait | None,
    now: float,
) -> str:
    cycle = cycle_in(graph)
    if cycle:
        links = (
            f"{name} waits for {following} ({_what(owners[name])})"
            for name, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        )
        return f"deadlock: {', '.join(links)}"
    if expired is None:
        return "no deadlock"
    waited = f"{expired.owner} waited {now - expired.since:.1f} s for {expired.what}"
    ends = [_end(flow, owners, name, waiter, now) for name, waiter in _ends(graph, expired.owner)]
    # Blame the end of the chain that has been in its state for the longest time.
    return f"{max(ends)[1]}; {waited}" if ends else waited


def _end(
    flow: AsyncTrainingFlow, owners: Mapping[str, _Owner], name: str, waiter: str, now: float
) -> tuple[float, str]:
    """Return for how many seconds `name` has held up `waiter`, and a description of it."""
    machine = next((m for m in flow.machines if m.name == name), None)
    if machine is not None:
        doing = f", {_what(owners[name])}" if name in owners else ""
        return flow.log.elapsed() - machine.machine.since_t, f"{_state(machine, flow)}{doing}"
    return max(
        now - wait.since for wait in owners[waiter].waits
    ), f"{name} holds up {waiter}, {_what(owners[waiter])}"


def _ends(graph: Mapping[str, Sequence[str]], start: str) -> Iterator[tuple[str, str]]:
    """Yield the owners at the end of the chain of waits, each with one owner that waits for it."""
    seen, queue = {start}, deque([start])
    while queue:
        waiter = queue.popleft()
        for name in graph.get(waiter, ()):
            if name not in seen:
                seen.add(name)
                queue.append(name)
                if name not in graph:
                    yield name, waiter


def _waits(owners: Mapping[str, _Owner], now: float) -> list[str]:
    lines = []
    for name, owner in owners.items():
        for wait in owner.waits:
            limit = "no deadline" if wait.timeout_s is None else f"of at most {wait.timeout_s:g} s"
            holders = wait.holders()
            arrow = f" -> {', '.join(holders.names)}" if holders.names else ""
            lines.append(f"{name} waits since {now - wait.since:.1f} s ({limit}) for {wait.what}{arrow}")
            if holders and not holders.names:
                lines.append(f"  {holders}")
    return lines


def _what(owner: _Owner) -> str:
    return "waiting " + " and ".join(f"for {wait.what}" for wait in owner.waits)


def _state(machine: RoleStateMachine, flow: AsyncTrainingFlow) -> str:
    return (
        f"{machine.name} is {machine.state.name} since {flow.log.elapsed() - machine.machine.since_t:.1f} s"
    )


def _item(machine: RoleStateMachine) -> str:
    described = ", ".join(f"{name} {value}" for name, value in machine.item.items())
    return f": {described}" if described else ""


def _channels(machines: Sequence[RoleStateMachine]) -> list[Channel[object]]:
    return list(dict.fromkeys(channel for machine in machines for channel in machine.outputs))


def _counts(flow: AsyncTrainingFlow) -> list[str]:
    queue, versions, fates = flow.queue, flow.versions, flow.fates
    counts = ", ".join(f"{count} {fate}" for fate, count in fates.counts().items())
    return [
        f"message queue: {queue.untrained} groups untrained, {queue.finished} of them finished, room for "
        f"{queue.room()}",
        f"versions: trained {versions.trained}, gathered {versions.gathered}, served {versions.served}",
        f"groups: {fates.drawn} drawn, {counts}, {len(fates.in_flight)} without a fate",
        f"steps trained: {fates.step} of {flow.schedule.last_step}",
    ]
