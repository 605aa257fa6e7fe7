# SPDX-License-Identifier: Apache-2.0
"""Why a pipeline stands still, in words: who waits for whom, what everybody does, what happened last.

Composes text from what is in memory and changes nothing, so it may be asked for at any moment on the loop;
the
moment of interest is the one at which the deadline of a wait has passed, before the roles are stopped.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .channel import Channel
from .wait_graph import Wait, cycle_in, waits_of

if TYPE_CHECKING:
    from .flow import AsyncTrainingFlow
    from .role import RoleStateMachine

LAST_EVENTS = 30


class Diagnosis(NamedTuple):
    """What is the matter."""

    cause: str
    """One line."""
    text: str
    """All that is known, in paragraphs."""


class _Owner(NamedTuple):
    waits: tuple[Wait, ...]
    holders: tuple[str, ...]
    """Those of whom any one could let this one go on; none: that may come from elsewhere."""


def diagnose(flow: AsyncTrainingFlow, expired: Wait | None = None) -> Diagnosis:
    """Call it on the flow's loop. `expired`: the wait whose deadline has passed."""
    now = asyncio.get_running_loop().time()
    owners = _owners()
    graph = {name: owner.holders for name, owner in owners.items() if owner.holders}
    cause = _cause(flow, owners, graph, expired, now)
    paragraphs = (
        ("cause", [cause]),
        ("who waits for whom", _waits(owners, now)),
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
        # One wait that nobody of the pipeline has to end is enough to go on.
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
    # Of those at the end of the chain, the one that has done the same for the longest.
    return f"{max(ends)[1]}; {waited}" if ends else waited


def _end(
    flow: AsyncTrainingFlow, owners: Mapping[str, _Owner], name: str, waiter: str, now: float
) -> tuple[float, str]:
    """For how long, in seconds, somebody has been what keeps `waiter` waiting; and that in words."""
    machine = next((m for m in flow.machines if m.name == name), None)
    if machine is not None:
        doing = f", {_what(owners[name])}" if name in owners else ""
        return flow.log.elapsed() - machine.machine.since_t, f"{_state(machine, flow)}{doing}"
    return max(
        now - wait.since for wait in owners[waiter].waits
    ), f"{name} holds up {waiter}, {_what(owners[waiter])}"


def _ends(graph: Mapping[str, Sequence[str]], start: str) -> Iterator[tuple[str, str]]:
    """Those that can be reached and wait for nobody of the pipeline, each with one who waits for it."""
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
            whom = f" -> {', '.join(holders.names)}" if holders.names else ""
            lines.append(f"{name} waits since {now - wait.since:.1f} s ({limit}) for {wait.what}{whom}")
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
