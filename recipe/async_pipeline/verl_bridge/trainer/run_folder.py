# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: what an earlier process left there, and the files that this one appends to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ...config.runtime import RuntimeConfig
from ...config.schema import AsyncPipelineConfig
from ...config.settings_file import as_settings
from ...observe.event_file import EventFile
from ...observe.run_files import rows_until, run_of, set_aside
from ..rollout.server_manager import devices_of_a_node

OF_THE_END = ("summary.json", "trace.json", "report.html")
"""What another process made of its end, which is not the end of this run."""


class RunFolder:
    """A resumed run appends to its own ledger, and keeps its metrics up to the checkpoint."""

    def __init__(self, path: Path, run: str, resumed_step: int | None) -> None:
        """`resumed_step` is that of the checkpoint, or None if the run starts from the beginning."""
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        metrics, ledger = path / "metrics.jsonl", path / "ledger.jsonl"
        same_run = resumed_step is not None and run_of(ledger) == run
        self.rows: list[dict[str, Any]] = []
        """Metrics of the steps up to the checkpoint."""
        if resumed_step is not None:
            self.rows = rows_until(metrics, resumed_step) if same_run else []
            set_aside(metrics)
            set_aside(path / "events.jsonl")
            if not same_run:
                set_aside(ledger)
        self.ledger = EventFile(ledger, append=same_run)
        # verl's file tracker takes its path from here.
        os.environ["VERL_FILE_LOGGER_PATH"] = str(metrics)
        for name in OF_THE_END:
            (path / name).unlink(missing_ok=True)

    def repeat_rows(self, logger: Any) -> None:
        """Write the kept metrics to the metrics file; other trackers have them already."""
        for row in self.rows:
            logger.log(data=row["data"], step=row["step"], backend=["file"])
        self.rows = []


def speed_settings(config: DictConfig, knobs: AsyncPipelineConfig, runtime: RuntimeConfig) -> dict[str, Any]:
    """Return what the speed of the run depends on; a profile is made of it and of the event log."""
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
