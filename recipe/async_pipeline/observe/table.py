# SPDX-License-Identifier: Apache-2.0
"""Render the table of steps, the progress line and the closing lines of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MARK = "[async_pipeline]"
"""Prefix of every line for the user; `async-pipeline watch` shows these and writes the rest to run.log."""

_COLUMNS: tuple[tuple[str, str], ...] = (
    ("step", "{:>9}"),
    ("reward", "{:>7.3f}"),
    ("tokens", "{:>7.1f}"),
    ("lag", "{:>4.2f}"),
    ("lag_max", "{:>7.0f}"),
    ("served", "{:>6.0f}"),
    ("kl", "{:>9.5f}"),
    ("train_s", "{:>8.2f}"),
    ("step_s", "{:>7.2f}"),
    ("samples/s", "{:>10.1f}"),
)

FATES = ("trained", "filtered", "expired", "failed", "in_flight")
"""Fates of a group; their counts sum to the number of groups drawn."""

TRANSIENT = MARK + "~"
"""Prefix of a line that a terminal replaces with the next one, and that no file keeps."""


def marked(text: str) -> str:
    """Return a text for the user with the mark before each of its lines."""
    return "\n".join(f"{MARK} {line}" for line in text.splitlines())


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One row of the table: an optimizer step."""

    step: int
    last_step: int
    reward: float
    tokens: float
    lag_mean: float
    lag_max: float
    served: float
    kl: float
    train_s: float
    step_s: float
    samples: int

    def render(self) -> str:
        """Return the row as one line with the prefix."""
        values: tuple[object, ...] = (
            f"{self.step}/{self.last_step}",
            self.reward,
            self.tokens,
            self.lag_mean,
            self.lag_max,
            self.served,
            self.kl,
            self.train_s,
            self.step_s,
            self.samples / self.step_s if self.step_s > 0 else 0.0,
        )
        cells = [_cell(fmt, value) for (_, fmt), value in zip(_COLUMNS, values, strict=True)]
        return f"{MARK} {' '.join(cells)}"


def _cell(fmt: str, value: object) -> str:
    """Return a value in its column; one that rounds to zero has no sign."""
    text = fmt.format(value)
    return text if text.strip(" -0.") else text.replace("-", " ")


def progress(row: StepRow, *, untrained: float, finished: float, critical: str) -> str:
    """Return the progress of the run as a transient line; `untrained` and `finished` count groups."""
    rate = row.samples / row.step_s if row.step_s > 0 else 0.0
    return (
        f"{TRANSIENT} step {row.step}/{row.last_step}  reward {row.reward:.3f}  {rate:.1f} samples/s  "
        f"lag {row.lag_mean:.2f} (max {row.lag_max:.0f})  queue: {untrained:.0f} groups in flight, "
        f"{finished:.0f} finished" + (f"  slowest: {critical}" if critical else "")
    )


def header() -> str:
    """Return the column titles, aligned with the rows."""
    widths = [len(fmt.format("" if name == "step" else 0)) for name, fmt in _COLUMNS]
    return f"{MARK} {' '.join(name.rjust(width) for (name, _), width in zip(_COLUMNS, widths, strict=True))}"


def closing(summary: Mapping[str, object]) -> list[str]:
    """Return the last lines of a run, from its summary."""
    steps, before = int(str(summary["steps"])), int(str(summary.get("steps_before", 0)))
    some = f", {steps - before} of them" if before else ""
    lines = [
        f"{MARK} {summary['status']}: {summary['strategy']}, {steps} steps{some} in {summary['train_s']} s"
    ]

    first, last = summary.get("reward_first"), summary.get("reward_last")
    if isinstance(first, float) and isinstance(last, float):
        lines.append(
            f"{MARK} reward {first:.3f} -> {last:.3f} (means over the first and last fifth of the steps)"
        )

    lines.append(
        f"{MARK} lag_max {summary['lag_max']} of {summary['max_lag']} allowed; served version "
        f"{summary['served_version']} of {summary['trainer_version']}"
        + (
            f"; generate and train overlapped for {summary['overlap_s']} s"
            if summary["overlap_s"] is not None
            else ""
        )
    )
    if "overlap_efficiency" in summary and summary["groups_trained"]:
        idle, efficiency = (percent(float(str(summary[n]))) for n in ("bubble_ratio", "overlap_efficiency"))
        lines.append(
            f"{MARK} since the first version was served: devices idle {idle} of "
            f"the time, overlap efficiency {efficiency} (100%: no schedule of "
            "this work is faster); the report leaves out the first step"
        )

    fates = ", ".join(f"{summary[f'groups_{fate}']} {fate.replace('_', ' ')}" for fate in FATES)
    again = summary["groups_regenerated"]
    lines.append(
        f"{MARK} {summary['groups_drawn']} groups drawn: {fates}"
        + (f"; {again} generated again" if again else "")
    )

    skipped = summary.get("updates_skipped")
    if skipped:
        lines.append(
            f"{MARK} {skipped} of the steps did not train, or not on all of their mini-batches, because "
            "gradients were not finite; see actor/grad_norm and critic/grad_norm"
        )
    if summary.get("checkpoints_failed"):
        lines.append(
            f"{MARK} {summary['checkpoints_failed']} checkpoints could not be written; the last complete one "
            f"is of step {summary['checkpoint_last']}"
        )
    for key, what in (
        ("observers_off", "switched off after an error"),
        ("observers_failing", "failing at the end"),
    ):
        if isinstance(errors := summary.get(key), Mapping):
            lines += [f"{MARK} {what}: {name} ({error})" for name, error in errors.items()]
    return lines


def percent(share: float) -> str:
    """Format a share in [0, 1] as a percentage."""
    return f"{share:.0%}" if share >= 0.0995 or share == 0 else f"{share:.1%}"


LEAST_EXPLAINED = 0.9
"""Share of the served elements below which the engine's tables are no check of the loader."""


def map_coverage(share: float, unexplained: str) -> str:
    """Describe how much of the served weights the engine's own tables explain; a warning if it is little."""
    text = f"The engine's own tables explain {100 * share:.1f} % of the served elements"
    if share >= LEAST_EXPLAINED:
        return text
    return (
        f"WARNING: {text}. The rest, such as {unexplained}, is checked by order and coverage "
        "only; a loader that swaps two tensors of one shape would not be noticed there"
    )
