# SPDX-License-Identifier: Apache-2.0
"""Draw the timeline of a report: the activity of each pool and stage, as an overview and as a close-up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from ....core.events import Interval
from ....observe.account.accounting import is_work
from ..figures.data import RunData, Span
from ..html_page import part
from .charts import figure, stack, strip, tick_places, ticks
from .wording import colour_of, reason_in_words, role_colour

CLOSE_UP_STEPS = 4
MAX_SPANS = 40_000
"""Above this number the page embeds no spans and cannot zoom; trace.json has them all."""
FINEST = 20_000
"""Close gaps between a stage's spans shorter than 1/FINEST of the run, to keep the page small."""

Row = tuple[str, str, Sequence[Span]]
"""Kind (`pool`, `role` for a stage of the pool above, `no device` for other stages), label, spans."""


def timeline(run: RunData) -> Markup:
    """Return the overview and the close-up of a few middle steps, or an empty string without events."""
    if not run.pools or run.accounting is None:
        return Markup()

    end = max(b for spans in run.pools.values() for _, b, _ in spans)

    rows = _rows(run, end)
    first, last = _close_up(run, end)

    whole = figure(
        "The whole run",
        part("overview", _drawn(rows, 0.0, end)),
        wide=True,
        says="Share of time that each stage computed: "
        + "; ".join(f"{role} {_total(s) / end:.0%}" for role, s in run.roles.items()),
        note="Rows of pools: solid is work, pale is waiting, in the colour of the stage that the pool waits "
        "for. Rows of stages: solid while the stage computes. Drag to select the close-up.",
    )

    steps = [step for step, at in run.step_ends.items() if first < at <= last]
    close = figure(
        "Close-up",
        part("closeup", _drawn(rows, first, last), _data(rows, end, first, last)),
        wide=True,
        note=f"Steps {steps[0]} to {steps[-1]}, from {first:.1f} s to {last:.1f} s." if steps else "",
    )
    return whole + close


def _total(spans: Sequence[Interval]) -> float:
    return sum(b - a for a, b in spans)


def _close_up(run: RunData, end: float) -> tuple[float, float]:
    """Return start and end in seconds of a few steps in the middle of the run."""
    ends = list(run.step_ends.values())
    if len(ends) <= CLOSE_UP_STEPS:
        return 0.0, end
    first = (len(ends) - CLOSE_UP_STEPS) // 2
    return (ends[first - 1] if first else 0.0), ends[first + CLOSE_UP_STEPS - 1]


def _rows(run: RunData, end: float) -> list[Row]:
    assert run.accounting is not None
    rows: list[Row] = []
    without_devices = [role for role in run.roles if role not in run.home]
    for pool, account in run.accounting.pools.items():
        rows.append(
            (
                "pool",
                f"{pool}: {account.devices} device{'s' if account.devices != 1 else ''}",
                run.pools.get(pool, ()),
            )
        )
        rows += [_role(run.roles, role, end) for role in account.roles if role in run.roles]
    return [*rows, *(_role(run.roles, role, end, "no device") for role in without_devices)]


def _role(roles: Mapping[str, Sequence[Interval]], role: str, end: float, kind: str = "role") -> Row:
    merged: list[Span] = []
    for a, b in roles[role]:
        if merged and a - merged[-1][1] < end / FINEST:
            a = merged.pop()[0]
        merged.append((a, b, role))
    return kind, role, merged


def _drawn(rows: Sequence[Row], start: float, end: float) -> Markup:
    lanes: list[tuple[str, str, Markup | None]] = []
    without_devices = next((label for kind, label, _ in rows if kind == "no device"), None)
    for kind, label, spans in rows:
        if label == without_devices:
            lanes.append(("pool", "no device", None))
        shapes = (
            stack(spans, colour_of, start, end, is_work)
            if kind == "pool"
            else strip([(a, b) for a, b, _ in spans], role_colour(label), start, end)
        )
        lanes.append(("pool" if kind == "pool" else "role", label, shapes))
    return part("lanes", lanes, tick_places(ticks(start, end, 5), start, end))


def _data(rows: Sequence[Row], end: float, first: float, last: float) -> str:
    """Return the data of the page's script as JSON, or an empty string if it is too large."""
    if sum(len(spans) for _, _, spans in rows) > MAX_SPANS:
        return ""

    names = sorted(
        {what for kind, _, spans in rows if kind == "pool" for _, _, what in spans},
        key=lambda what: (not is_work(what), what),
    )

    kinds = [{"name": reason_in_words(what), "colour": colour_of(what)} for what in names]

    drawn = []
    for kind, label, spans in rows:
        if kind == "pool":
            drawn.append(
                {
                    "pool": True,
                    "spans": [[round(a, 3), round(b, 3), names.index(what)] for a, b, what in spans],
                }
            )
        else:
            drawn.append(
                {
                    "pool": False,
                    "name": label,
                    "colour": role_colour(label),
                    "spans": [[round(a, 3), round(b, 3)] for a, b, _ in spans],
                }
            )

    data = {
        "end": round(end, 3),
        "from": round(first, 3),
        "to": round(last, 3),
        "kinds": kinds,
        "rows": drawn,
    }
    return json.dumps(data, separators=(",", ":"))
