# SPDX-License-Identifier: Apache-2.0
"""Whole jobs that train with Megatron on parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from recipe.async_pipeline.observe.ledger_file import audit_file
from tests.e2e.job import Job, check_clean_end, check_events, run_job, smoke_command

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(find_spec("megatron") is None, reason="no megatron")]

MEGATRON = "training_engine=megatron"
SIZES = "actor_rollout_ref.actor.megatron"
TWO_RANKS = ("trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=3")
KL_MAX = 0.005
"""Of one policy between the trainer's log-probs and the engine's."""
LAGS = {"on_policy": 0, "one_step_off": 1, "n_step_ahead": 3, "fully_async": 3}
"""Largest lag that a strategy permits here."""


class Layout(NamedTuple):
    """A model on two training ranks."""

    task: str
    """The fixture."""
    overrides: tuple[str, ...]


LAYOUTS: Mapping[str, Layout] = {
    "dense-tp2": Layout("tied_task", (MEGATRON, *TWO_RANKS, f"{SIZES}.tensor_model_parallel_size=2")),
    "moe-ep2": Layout("moe_task", (MEGATRON, *TWO_RANKS, f"{SIZES}.expert_model_parallel_size=2")),
}


def train(task: Path, folder: Path, strategy: str, steps: int, *overrides: str) -> Job:
    lag = LAGS[strategy]
    more = [f"trainer.v1.async_pipeline.staleness.max_lag={lag}"] if lag > 1 else []
    command = smoke_command(
        f"async_strategy={strategy}",
        f"trainer.total_training_steps={steps}",
        f"trainer.v1.async_pipeline.run_dir={folder}",
        *more,
        *overrides,
    )
    return run_job(command, folder, task)


def check_trained(job: Job, strategy: str, steps: int) -> dict[str, Any]:
    """Whole jobs of every strategy end like this: trained and proved, with every prompt accounted for."""
    summary = check_clean_end(job, strategy, LAGS[strategy], steps)
    check_events(job)
    assert audit_file(job.run_dir).violations == []
    assert "weights are assembled" not in job.output, "each rank publishes what it holds"
    rows = [row["data"] for row in job.metrics() if "actor/pg_loss" in row["data"]]
    assert len(rows) == steps and all(row["actor/grad_norm"] > 0 for row in rows)
    if strategy == "on_policy":
        assert summary["rollout_corr_kl_max"] <= KL_MAX
    return summary


@pytest.mark.parametrize("name", LAYOUTS)
def test_parallel_ranks_publish_what_they_train(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    layout = LAYOUTS[name]
    task = request.getfixturevalue(layout.task)
    check_trained(train(task, tmp_path / "run", "on_policy", 3, *layout.overrides), "on_policy", 3)
