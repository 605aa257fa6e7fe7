# SPDX-License-Identifier: Apache-2.0
"""Write run directories in virtual time, with the real flow, events and summary and with invented costs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.core.events import LogRecord
from recipe.async_pipeline.core.groups.items import Group, Prompt, Publication, StepBatch
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.observe.account.accountant import StepAccountant
from recipe.async_pipeline.observe.run_directory.summary import RunRecorder, write_atomically
from tests.fakes.trainer import SimTrainer

ROLES = ("dataloader", "generate", "rollout", "logp", "ref_logp", "reward", "train", "param_update")


class RecordedTrainer(SimTrainer):
    """Generates responses of lognormal length with a rising reward, and logs metrics as the real trainer."""

    def __init__(
        self,
        *,
        devices: Mapping[str, int] | None = None,
        seed: int = 1,
        slow: float = 1.0,
        gain: float = 0.6,
        **kwargs: Any,
    ) -> None:
        super().__init__(answer_s=self._seconds_of, **kwargs)
        self._devices = {"train": 4, "generate": 4, **(devices or {})}
        self._random = random.Random(seed)
        self._slow, self._gain = slow, gain
        self.rows: list[dict[str, Any]] = []
        self.accounts = StepAccountant()
        self._last: Publication | None = None
        self._open: dict[str, float] = {}
        self._busy_s = 0.0
        self.now: Callable[[], float] = lambda: 0.0
        self._last_t = 0.0

    def pools(self) -> Mapping[str, int]:
        return {name: self._devices.get(name, 1) for name in super().pools()}

    def _seconds_of(self, step: int, index: int) -> float:
        return min(60.0, self._slow * self._random.lognormvariate(1.2, 0.7))

    async def answer(self, prompt: Prompt) -> Group:
        began = self.now()
        group = await super().answer(prompt)
        seconds = self.now() - began
        level = 0.2 + self._gain * (1 - math.exp(-prompt.step / 25))
        answers = [
            replace(
                t,
                seconds=seconds,
                num_tokens=int(seconds * 60 * self._random.uniform(0.8, 1.0)),
                reward=float(self._random.random() < level),
            )
            for t in group.trajectories
        ]
        return replace(group, trajectories=tuple(answers))

    async def publish(self, version: int, snapshot: object) -> Publication:
        made = await super().publish(version, snapshot)
        jitter = self._random.uniform(0.8, 1.3)
        self._last = replace(
            made,
            gather_s=0.12 * jitter,
            transfer_s=0.3 * jitter,
            load_s=0.2 * jitter,
            stall_s=0.06 * jitter,
            num_bytes=1_200_000_000,
            replicas=2,
        )
        return self._last

    async def finish_step(self, batch: StepBatch, facts: Mapping[str, float]) -> None:
        await super().finish_step(batch, facts)
        answers = [t for g in batch.groups for t in g.trajectories]
        lags = [batch.step - 1 - t.first_version for t in answers]
        now = self.now()
        step_s, self._last_t = now - self._last_t, now

        lengths = [t.num_tokens for t in answers]
        rewards = [t.reward or 0.0 for t in answers]

        own = {
            **facts,
            **self.accounts.take(),
            **{
                f"lag/trajectory_share/{k}": lags.count(k) / len(lags)
                for k in range(self.schedule.max_lag + 1)
            },
            "off_policy/ess/all": 1.0 - 0.05 * max(lags),
        }
        if self._last is not None:
            names = ("version", "num_bytes", "gather_s", "transfer_s", "load_s", "stall_s")
            own |= {f"param_update/{name}": float(getattr(self._last, name)) for name in names}

        data = {
            **{f"async_pipeline/{name}": value for name, value in own.items()},
            "critic/score/mean": sum(rewards) / len(rewards),
            "response_length/mean": sum(lengths) / len(lengths),
            "response_length/max": float(max(lengths)),
            "rollout_corr/kl": 0.002 * (1 + max(lags)),
            "timing_s/step": step_s,
        }
        self.rows.append({"step": batch.step, "data": data})
        self.recorder.record(sum(rewards) / len(rewards), step_s, 0.01, now)

    recorder: RunRecorder


def write_run(
    folder: Path,
    trainer: RecordedTrainer,
    *,
    strategy: str = "one_step_off",
    startup_s: float = 30.0,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Run the trainer and write events.jsonl, metrics.jsonl, summary.json and config.json. Returns folder."""
    folder.mkdir(parents=True, exist_ok=True)
    records: list[LogRecord] = []
    flow = AsyncTrainingFlow(trainer, startup_s=lambda: startup_s)
    flow.log.subscribe(records.append)
    flow.log.subscribe(trainer.accounts)
    trainer.now = flow.clock.now
    trainer.recorder = RunRecorder(
        strategy=strategy, max_lag=trainer.schedule.max_lag, started_unix=-startup_s
    )
    run_virtual(flow.run())

    max_lag = trainer.schedule.max_lag
    (folder / "events.jsonl").write_text("".join(json.dumps(r.as_dict()) + "\n" for r in records))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in trainer.rows))
    summary = trainer.recorder.summarize(flow.result(), 0.0, records[-1].t) | trainer.accounts.summary()
    write_atomically(folder / "summary.json", summary)
    write_atomically(
        folder / "config.json",
        config or {"trainer": {"v1": {"async_pipeline": {"strategy": strategy, "max_lag": max_lag}}}},
    )
    return folder
