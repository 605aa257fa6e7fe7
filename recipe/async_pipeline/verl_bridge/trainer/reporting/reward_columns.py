# SPDX-License-Identifier: Apache-2.0
"""What a reward function returns besides the score, in the form that verl's metrics and files take."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....core.groups.scores import Score
from ....observe.observers import FILE_ATTEMPTS, Observers
from ....observe.run_directory.run_files import set_aside


def numbers_or_text(columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return columns that hold only numbers and None, or only text and None.

    verl averages a column unless its first value is a text. A column with any other value becomes text, of
    which verl makes no metric.
    """
    return {name: _numbers(values) or _texts(values) for name, values in columns.items()}


def _numbers(values: Sequence[Any]) -> list[float | None] | None:
    """Return the values as numbers, or None if one of them is none. NaN and infinity are numbers here."""
    found = [
        value if value is None or isinstance(value, float) else Score.of(value).value for value in values
    ]
    lost = any(one is None and value is not None for one, value in zip(found, values, strict=True))
    return None if lost else found


def _texts(values: Sequence[Any]) -> list[str | None]:
    return [None if value is None else str(value) for value in values]


def file_writer(
    observers: Observers, write: Callable[..., object], folder: str, started_unix: float
) -> Callable[..., None]:
    """Return verl's `_write_generations` without errors: it observes a run, and takes any value.

    A file from before this process started is set aside.
    """

    def write_any(
        inputs: Any, outputs: Any, gts: Any, scores: Any, columns: Mapping[str, Any], step: int
    ) -> None:
        columns = {name: for_json(values) for name, values in columns.items()}
        before = Path(folder) / f"{step}.jsonl"
        if before.exists() and before.stat().st_mtime < started_unix:
            set_aside(before)
        write(inputs, outputs, for_json(gts), scores, columns, folder, step)

    return observers.guard(
        f"the files in {folder}", write_any, lost="without further ones", attempts=FILE_ATTEMPTS
    )


def for_json(values: Sequence[Any]) -> list[Any]:
    """Return the values, each that JSON cannot represent as its text."""
    return [_for_json(value) for value in values]


def _for_json(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return str(value)
    return value
