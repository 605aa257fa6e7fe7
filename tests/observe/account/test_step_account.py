# SPDX-License-Identifier: Apache-2.0
"""The device-seconds of all steps add up to the summary."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.core.groups.items import StepBatch
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.observe.account.accountant import account
from recipe.async_pipeline.observe.account.step_account import StepAccountant, summary_of
from tests.fakes.trainer import SimTrainer


class AccountingTrainer(SimTrainer):
    """Takes the metrics once per step, as the real trainer does."""

    def __init__(self, accounts: StepAccountant) -> None:
        super().__init__(max_lag=1, steps=8)
        self.accounts = accounts
        self.taken: list[dict[str, float]] = []
        self.critical: list[str] = []

    async def finish_step(self, batch: StepBatch, facts: Mapping[str, float]) -> None:
        self.taken.append(self.accounts.take())
        self.critical.append(self.accounts.critical_role())


def test_steps_add_up_to_the_run() -> None:
    accounts = StepAccountant()
    assert accounts.critical_role() == ""
    trainer = AccountingTrainer(accounts)
    flow = AsyncTrainingFlow(trainer)
    flow.log.subscribe(accounts)
    run_virtual(flow.run())

    rest = accounts.take()
    whole = account(flow.log.records)
    for kind, reason in (("busy", "compute_train"), ("idle", "wait_generate"), ("busy", "sync")):
        total = sum(step.get(f"{kind}/train/{reason}_s", 0.0) for step in [*trainer.taken, rest])
        assert total == pytest.approx(whole.pools["train"].seconds[reason]), reason
    assert total > 0
    assert all(
        0 <= step["bubble_ratio"] <= 1 and 0 <= step["overlap_efficiency"] <= 1 for step in trainer.taken
    )
    assert not any("start_up" in name for step in trainer.taken for name in step)

    assert set(trainer.critical) <= {"train", "logp", "ref_logp", "generate", "param_update"}
    assert accounts.summary() == summary_of(whole)
    shown = accounts.summary()["device_seconds"]["train"]
    assert shown.pop("devices") == 1
    assert sum(shown.values()) == pytest.approx(whole.wall_s, abs=0.01)
