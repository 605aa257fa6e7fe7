# SPDX-License-Identifier: Apache-2.0
"""The section of a report about episodes of several turns: success, turns, waits and ends."""

from __future__ import annotations

from markupsafe import Markup

from ..figures.episode_figures import EpisodeFigures
from .charts import Line, figure, grid, legend, line_chart, share_bar
from .wording import seconds

END_COLOURS = {
    "done": "c-sync",
    "turns": "c-generate",
    "tokens": "c-logp",
    "cut_off": "c-values",
    "invalid": "c-train",
    "env_failed": "c-critic",
}
OTHER_COLOUR = "c-other"


def episodes(found: EpisodeFigures) -> Markup:
    """Return charts of success, turns and waits, and a bar of the ends."""
    total = sum(found.ends.values())
    if not total:
        return Markup()
    success = line_chart(
        "Success: episodes that ended by themselves with a reward",
        [Line(label="share", series=found.success, colour="c-sync")],
        x_label="step",
        low=0.0,
        high=1.0,
    )
    turns = line_chart(
        "Turns of an episode",
        [
            Line(label="mean", series=found.turns_mean, colour="c-generate"),
            Line(label="longest", series=found.turns_max, colour="c-train"),
        ],
        x_label="step",
        low=0.0,
        note="One answer of the policy is one turn.",
    )
    waits = line_chart(
        "What an episode waits for",
        [
            Line(label="policy, mean", series=found.model_s, colour="c-generate"),
            Line(label="policy, 95th percentile", series=found.model_s_p95, colour="c-generate", dashed=True),
            Line(label="environment, mean", series=found.env_s, colour="c-train"),
            Line(label="environment, 95th percentile", series=found.env_s_p95, colour="c-train", dashed=True),
        ],
        x_label="step",
        text=seconds,
        low=0.0,
        note="Environment: all seconds without an open request to the policy.",
    )
    gateway = line_chart(
        "What the gateway adds to a request: 95th percentile, in ms",
        [Line(label="ms", series=found.gateway_ms_p95, colour="c-sync")],
        x_label="step",
        low=0.0,
    )
    known = sorted(found.ends.items(), key=lambda item: -item[1])
    colours = {end: END_COLOURS.get(end, OTHER_COLOUR) for end, _ in known}
    bar = share_bar(
        [(colours[end], count / total, f"{end}: {count} of {total}") for end, count in known],
        "ends of episodes",
    )
    again = f"{found.again} failed attempts were repeated." if found.again else "None was repeated."
    ends = figure(
        "How episodes ended",
        bar + legend([(colours[end], f"{end}: {count}") for end, count in known]),
        note=again,
        wide=True,
    )
    return grid(success, turns, waits, gateway) + ends
