# SPDX-License-Identifier: Apache-2.0
"""A run whose process is a file of events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipe.async_pipeline.lab.soak.job import SoakFailed, SoakJob


def record(event: str, **fields: Any) -> dict[str, Any]:
    return {"t": 1.0, "role": "param_update", "event": event, **fields}


class Run(SoakJob):
    """A script is started instead of a run."""

    dead = False
    script = "true"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, [], folder, seed=1)
        self.run_dir.mkdir(parents=True)
        self._old_events = None

    @property
    def command(self) -> list[str]:
        return ["bash", "-c", f"cd '{self.folder}'; {self.script}"]

    def write(self, *records: dict[str, Any], end: str = "\n") -> None:
        with self._events.open("a") as file:
            file.write("\n".join(map(json.dumps, records)) + end)

    def check_alive(self) -> None:
        if self.dead:
            raise SoakFailed("it ended")
