# SPDX-License-Identifier: Apache-2.0
"""The run directory: set aside or continue the files of an earlier process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ....config.derived.runtime import RuntimeConfig
from ....config.derived.scheduling import as_settings
from ....config.knobs.schema import AsyncPipelineConfig
from ....observe.run_directory.event_file import EventFile
from ....observe.run_directory.run_files import rows_until, run_of, set_aside
from ....observe.trackers import Trackers
from ...rollout.server_manager import devices_of_a_node
from .terminal import say

ONCE = ("config.json", "settings.json", "summary.json", "trace.json", "report.html")
"""Files that an earlier process of the run wrote once, or `async-pipeline report` after it."""


class RunFolder:
    """The files of a run. A resumed run appends to its ledger, and keeps its metrics up to the checkpoint."""

    def __init__(self, path: Path, run: str, resumed_step: int | None) -> None:
        """`resumed_step` is the step of the checkpoint, or None if the run does not resume."""
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

        metrics, ledger = path / "metrics.jsonl", path / "ledger.jsonl"
        same_run = resumed_step is not None and run_of(ledger) == run
        self.rows: list[dict[str, Any]] = []
        """Metrics of the steps up to the checkpoint."""
        if same_run and resumed_step is not None:
            self.rows = rows_until(metrics, resumed_step)
        for name in ("metrics.jsonl", "events.jsonl", *ONCE, *([] if same_run else [ledger.name])):
            set_aside(path / name)

        self.ledger = EventFile(ledger, append=same_run, tell=say)
        # verl's file tracker reads its path from this variable.
        os.environ["VERL_FILE_LOGGER_PATH"] = str(metrics)

    def repeat_rows(self, trackers: Trackers) -> None:
        """Write the kept metrics to the metrics file; other trackers have them already."""
        for row in self.rows:
            trackers.log_metrics(row["data"], row["step"], only=["file"])
        self.rows = []


def speed_settings(config: DictConfig, knobs: AsyncPipelineConfig, runtime: RuntimeConfig) -> dict[str, Any]:
    """Return the settings that determine the speed of the run, as a profile stores them."""
    rollout = config.actor_rollout_ref.rollout
    return {
        **as_settings(knobs, runtime.old_logp),
        "placement": runtime.placement.as_list(),
        "groups": config.data.train_batch_size,
        "answers": rollout.n,
        "devices_per_replica": rollout.tensor_model_parallel_size,
        "devices_per_node": devices_of_a_node(runtime.placement),
        "slots": rollout.max_num_seqs,
    }
