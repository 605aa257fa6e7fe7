# SPDX-License-Identifier: Apache-2.0
"""Records of ledgers, whole and damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakes.lives import Life, Records
from tests.fakes.trainer import SimTrainer


def whole() -> Records:
    """The ledger of a run with all fates."""
    trainer = SimTrainer(
        max_lag=1,
        steps=4,
        groups=2,
        order="finished",
        straggler="drop",
        filtered=lambda uid: uid == "p2.0",
        answer_s=lambda step, index: 50.0 if (step, index) == (1, 1) else 0.5,
    )
    return Life(trainer).ledger


def at(records: Records, kind: str, number: int = 0) -> int:
    return [i for i, record in enumerate(records) if record["kind"] == kind][number]


def renumbered(records: Records) -> Records:
    return [{**record, "n": n} for n, record in enumerate(records, start=1)]


def trained_again(records: Records) -> Records:
    """The second step takes a group of the first."""
    first, second = (records[at(records, "trained", i)] for i in (0, 1))
    return changed("trained", 1, uids=[first["uids"][0], *second["uids"][1:]])(records)


def resumed() -> tuple[Records, Records]:
    """Records of a run that was killed, and of the run that resumed it."""

    def make(**more: Any) -> SimTrainer:
        return SimTrainer(max_lag=2, steps=6, save_every=2, **more)

    first = Life(make(), killed_at=290)
    assert first.checkpoints and not first.alive
    return first.ledger, Life(make(resume=first.checkpoints[-1])).ledger


def write(path: Path, records: list[object]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def changed(kind: str, number: int = 0, /, **fields: Any) -> Callable[[Records], Records]:
    return lambda records: [
        {**r, **fields} if i == at(records, kind, number) else r for i, r in enumerate(records)
    ]
