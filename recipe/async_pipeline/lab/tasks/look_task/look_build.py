# SPDX-License-Identifier: Apache-2.0
"""The directory of the look task: pictures in each row, processor, and warmed-up model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from recipe.async_pipeline.lab.tasks.build import Spec, save_model
from recipe.async_pipeline.lab.tasks.data import write_rows
from recipe.async_pipeline.lab.tasks.look_task.look import LookTask, look_rows
from recipe.async_pipeline.lab.tasks.look_task.look_model import (
    LookModelSpec,
    make_look_model,
    make_processor,
)
from recipe.async_pipeline.lab.tasks.look_task.look_warmup import LOOK_WARMUP, LookWarmup
from recipe.async_pipeline.lab.tasks.warmup import WarmupSpec


@dataclass(frozen=True, kw_only=True)
class LookSpec(Spec):
    """All parameters of the task."""

    kind: ClassVar[str] = "look"
    reward: ClassVar[Path | None] = Path(__file__).with_name("look_reward.py")

    model: LookModelSpec = field(default_factory=LookModelSpec)
    task: LookTask = field(default_factory=LookTask)
    warmup: WarmupSpec = LOOK_WARMUP

    @property
    def label(self) -> str:
        """Return the model's family."""
        return self.model.family

    def fill(self, work: Path, report: Callable[[str], None]) -> float:
        """Make data, processor and warmed-up model in `work`; the weights are saved in bf16.

        Returns the success of the policy before it is rounded. Takes about a minute on two cores.
        """
        pictures = self.task.pictures(self.seed)
        for split_name, of_split in zip(("train", "val"), pictures, strict=True):
            write_rows(look_rows(of_split, split_name), work / f"{split_name}.parquet")
        processor = make_processor(self.model.family)
        model: Any = make_look_model(self.model, processor.tokenizer, self.seed)
        warmup = LookWarmup(pictures, processor, model, self.warmup, seed=self.seed, report=report)
        success = warmup.run()
        report(
            f"warm-up done: success {success:.2f} on unseen pictures, lowered on purpose by answers with "
            "errors, so that RL has something to learn"
        )
        save_model(model, processor, work / "model")
        return success
