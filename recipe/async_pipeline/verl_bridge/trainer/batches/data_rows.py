# SPDX-License-Identifier: Apache-2.0
"""Read rows of a data set such that one that is no prompt, such as a broken picture, costs itself alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from ....errors import BadDataError
from ...agent_loop.prompt_pictures import closed

logger = logging.getLogger(__name__)
SEARCHED = 1000
"""Rows of which one can be read, or the data set is useless."""
ROW, FLAW = "__row__", "__flaw__"
"""Columns for training: the number of the row, and why it is no prompt, or nothing."""


def keep_readable(dataset: Any, *, training: bool) -> None:
    """Have data loaders read a data set with `read_rows`, unless it reads whole batches itself."""
    if not hasattr(dataset, "__getitems__"):
        dataset.__getitems__ = partial(read_rows, dataset, training=training)


def read_rows(dataset: Any, numbers: Sequence[int], *, training: bool) -> list[dict[str, Any]]:
    """Return rows with closed pictures. Runs where the data loader runs.

    In training, each has ROW and FLAW; one that cannot be read has the columns of another row. Validation
    leaves such rows out, and decodes pictures to find them. Raises BadDataError if no row can be read.
    """
    found, flaws = dict[int, dict[str, Any]](), dict[int, str]()
    for number in numbers:
        _read(dataset, number, found, flaws, decode=not training)
    readable = next(iter(found.values()), None) or _first_readable(dataset, flaws, decode=not training)
    if training:
        return [
            {**found.get(number, readable), ROW: number, FLAW: flaws.get(number, "")} for number in numbers
        ]
    for flaw in flaws.values():
        logger.warning("validation leaves out %s", flaw)
    return [found[number] for number in numbers if number in found] or [readable]


def _read(
    dataset: Any, number: int, found: dict[int, dict[str, Any]], flaws: dict[int, str], *, decode: bool
) -> None:
    """Read a row into `found`, or note in `flaws` why that fails."""
    try:
        found[number] = closed(dataset[number], decode=decode)
    except Exception as error:  # noqa: BLE001 - a data set may raise anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        flaws[number] = f"row {number} of the data, counted from 0 after verl's filter: {why}"


def _first_readable(dataset: Any, flaws: dict[int, str], *, decode: bool) -> dict[str, Any]:
    """Return a row that has the columns of the others."""
    found = dict[int, dict[str, Any]]()
    for number in range(min(len(dataset), SEARCHED)):
        _read(dataset, number, found, {}, decode=decode)
        if found:
            return found[number]
    raise BadDataError(f"no row of the data can be made a prompt; {next(iter(flaws.values()))}; correct it")
