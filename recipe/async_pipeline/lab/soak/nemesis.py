# SPDX-License-Identifier: Apache-2.0
"""The order of the faults, the loop that injects them, and the report."""

from __future__ import annotations

import json
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ...observe.causes import one_line
from ...tools.ledger.audit import Audit
from ...tools.ledger.file import NAME, audit_file
from ..event_audit import audit_events
from .faults import FAULTS, strike
from .job import START_S, SoakFailed, SoakJob, served

QUIET_SHARE, MIN_QUIET_S = 0.15, 20.0
"""Share of the time, and seconds at least, before the first fault; measures the undisturbed speed."""
GAP_S = (2.0, 6.0)
"""Range of the pause in seconds between a recovery and the next fault."""
EVERY_S = 45.0
"""About one fault per this many seconds, so that the run also works between faults."""
RECOVERY_S, RECOVERY_STEPS = 120.0, 20
"""Seconds, or the time of so many undisturbed steps if that is longer, after which a run that did not recover
counts as hung, which is a violation.
"""


@dataclass
class Struck:
    """One injected fault and its outcome."""

    kind: str
    at_s: float
    """Seconds since two steps were served."""
    recovery_s: float | None = None


@dataclass
class SoakOutcome:
    """The outcome of a soak."""

    struck: list[Struck] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    off: list[str] = field(default_factory=list)
    """Lines about observers that were switched off."""
    quiet_steps: int = 0
    quiet_s: float = 0.0
    steps: int = 0
    """Steps after the quiet time."""
    seconds: float = 0.0


def deck(seed: int, kinds: Sequence[str]) -> Iterator[str]:
    """Yield every kind once in random order, again and again, never the same kind twice in a row."""
    source, before = random.Random(seed), ""

    while True:
        cards = list(kinds)
        source.shuffle(cards)
        if len(cards) > 1 and cards[0] == before:
            cards.append(cards.pop(0))
        yield from cards
        before = cards[-1]


def room_for(seconds: float) -> int:
    """Return how many faults fit into `seconds`, without the quiet time."""
    return max(1, int((seconds - max(MIN_QUIET_S, QUIET_SHARE * seconds)) / EVERY_S))


def faults_within(seconds: float, kinds: int) -> int:
    """Return how many faults to spread over `seconds`: whole rounds of all kinds, at least one round."""
    return kinds * max(1, round(seconds / EVERY_S / kinds))


def soak(
    job: SoakJob, kinds: Sequence[str], seconds: float, seed: int, say: Callable[[str], None]
) -> SoakOutcome:
    """Start a run, leave it alone for a while, then inject faults until the time is up.

    The time starts when two steps have been served; after each recovery, the remaining time is divided evenly
    among the remaining faults. The first one is injected also if the undisturbed steps took all of it. A run
    that ends by itself or does not recover is a violation.
    """
    outcome, source = SoakOutcome(), random.Random(seed)
    job.start()
    try:
        job.wait_for("the first version served", served(1), START_S, since=0)
        # The first steps are slower than the rest: leave them out of the undisturbed speed.
        job.wait_for("two steps", served(3), START_S, since=0)
        begun, before, since = time.monotonic(), job.newest_version(), job.now()
        _sleep(job, max(MIN_QUIET_S, QUIET_SHARE * seconds))
        job.wait_for("an undisturbed step", served(1), START_S, since)
        first = job.newest_version()
        outcome.quiet_s, outcome.quiet_steps = time.monotonic() - begun, first - before
        limit_s = max(RECOVERY_S, RECOVERY_STEPS * outcome.quiet_s / outcome.quiet_steps)
        say(f"undisturbed: {outcome.quiet_steps} steps in {outcome.quiet_s:.0f} s")

        hurt, end = time.monotonic(), begun + seconds
        cards = list(islice(deck(seed, kinds), faults_within(end - hurt, len(kinds))))
        for dealt, kind in enumerate(cards):
            next_s = time.monotonic() + (end - time.monotonic()) / (len(cards) - dealt)
            _sleep(job, source.uniform(*GAP_S))
            if time.monotonic() > end and outcome.struck:
                break

            one = Struck(kind, time.monotonic() - begun)
            outcome.struck.append(one)
            say(f"{one.at_s:6.0f} s  version {job.newest_version()}  {kind}: {FAULTS[kind].text}")
            one.recovery_s = strike(job, FAULTS[kind], limit_s)
            say(
                f"{time.monotonic() - begun:6.0f} s  version {job.newest_version()}  recovered after "
                f"{one.recovery_s:.1f} s"
            )
            _sleep(job, next_s - time.monotonic())

        outcome.seconds, outcome.steps = time.monotonic() - hurt, job.newest_version() - first
        job.end(signal.SIGINT)
    except (SoakFailed, TimeoutError) as error:
        last = f" after {outcome.struck[-1].kind}" if outcome.struck else ""
        outcome.hangs.append(f"the run did not recover{last}: {one_line(error)}")
    finally:
        outcome.off = job.switched_off()
        job.kill()
    return outcome


def _sleep(job: SoakJob, seconds: float) -> None:
    """Sleep. Raises SoakFailed if the run ends in the meantime."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.5))
        job.check_alive()


def report(outcome: SoakOutcome, run_dir: Path, kinds: Sequence[str]) -> dict[str, Any]:
    """Return the report that `soak --json` prints."""
    # A run that hung while it started has no ledger.
    begun = not outcome.hangs or (run_dir / NAME).is_file()
    ledger = audit_file(run_dir) if begun else Audit()
    recovered = [one.recovery_s for one in outcome.struck if one.recovery_s is not None]
    injected = Counter(one.kind for one in outcome.struck)

    return {
        "faults_injected": dict(sorted(injected.items())),
        "not_injected": [kind for kind in kinds if kind not in injected],
        "recovered": len(recovered),
        "steps": ledger.steps,
        "samples": samples(ledger),
        "violations": [*outcome.hangs, *outcome.off, *ledger.violations, *violations_of(run_dir)],
        "recovery_s": {"median": round(statistics.median(recovered), 2), "max": round(max(recovered), 2)}
        if recovered
        else None,
        "goodput_ratio": goodput_ratio(outcome),
        "recovery_s_by_fault": by_kind(outcome.struck),
        "processes": ledger.processes,
    }


def samples(ledger: Audit) -> dict[str, int]:
    """Return the number of prompts by their fate."""
    return {
        "dispatched": ledger.dispatched,
        "trained": ledger.trained,
        "filtered": ledger.filtered,
        "expired": ledger.expired,
        "failed": ledger.failed,
        "in_flight": ledger.in_flight,
    }


def violations_of(run_dir: Path) -> list[str]:
    """Return the violations in the event logs of all processes that wrote to a run directory."""
    return [
        f"{path.name}: {text}"
        for path in sorted(run_dir.rglob("events*.jsonl"))
        for text in audit_events(_records(path)).violations
    ]


def _records(path: Path) -> Iterable[dict[str, Any]]:
    """Yield the complete lines; a killed process may have left an incomplete last line."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield json.loads(line)


def goodput_ratio(outcome: SoakOutcome) -> float | None:
    """Return the steps per second that were kept, with faults relative to without; None without both."""
    if not outcome.quiet_steps or not outcome.seconds:
        return None
    return round(outcome.steps / outcome.seconds / (outcome.quiet_steps / outcome.quiet_s), 3)


def by_kind(struck: Iterable[Struck]) -> dict[str, list[float]]:
    """Return the recovery times in seconds by kind of fault."""
    found: dict[str, list[float]] = {}
    for one in struck:
        if one.recovery_s is not None:
            found.setdefault(one.kind, []).append(round(one.recovery_s, 2))
    return dict(sorted(found.items()))
