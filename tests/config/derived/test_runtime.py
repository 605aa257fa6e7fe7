# SPDX-License-Identifier: Apache-2.0
"""A config preserves the state of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.config.derived.runtime import RuntimeConfig
from recipe.async_pipeline.config.paths import RUNTIME, nested
from recipe.async_pipeline.config.placement import Placement, Pool


@pytest.mark.parametrize(
    ("resume_from", "manager"), [(None, None), (Path("/c/global_step_4"), {"name": "naive"})]
)
def test_it_is_read_as_it_was_written(resume_from: Path | None, manager: dict[str, Any] | None) -> None:
    runtime = RuntimeConfig(
        run="17-ab",
        identity={"verl": "0.9"},
        epoch=1,
        run_dir=Path("/outputs/run"),
        run_dir_mark=None,
        resume_from=resume_from,
        started_unix=12.5,
        placement=Placement((Pool("train", ("train", "logp"), (2,)), Pool("g", ("generate",), (1, 1)))),
        old_logp="logp_pool",
        reward_manager=manager,
    )
    config = json.loads(json.dumps(nested({RUNTIME: runtime.plain()})))
    assert RuntimeConfig.of(config) == runtime
