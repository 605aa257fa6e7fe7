# SPDX-License-Identifier: Apache-2.0
"""The directory of the FrozenLake task: data with a seed in each row, tokenizer, and warmed-up model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from recipe.async_pipeline.lab.tasks.build import TextSpec
from recipe.async_pipeline.lab.tasks.data import write_rows
from recipe.async_pipeline.lab.tasks.lake_task.lake import LakeTask
from recipe.async_pipeline.lab.tasks.lake_task.lake_warmup import WARMUP, LakeWarmup
from recipe.async_pipeline.lab.tasks.warmup import WarmupSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

DATA_SOURCE = "async_pipeline/frozen_lake"


@dataclass(frozen=True, kw_only=True)
class LakeSpec(TextSpec):
    """All parameters of the task."""

    kind: ClassVar[str] = "lake"
    reward: ClassVar[Path | None] = None
    """The environment scores."""

    task: LakeTask = field(default_factory=LakeTask)
    warmup: WarmupSpec = WARMUP

    def write_data(self, work: Path) -> None:
        """Write a row of each board."""
        train, val = self.task.seeds(self.seed)
        write_rows(lake_rows(train, "train"), work / "train.parquet")
        write_rows(lake_rows(val, "val"), work / "val.parquet")

    def warm_up(
        self, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, report: Callable[[str], None]
    ) -> float:
        """Teach the way to the goal, then degrade the policy; return its success on unseen boards."""
        return LakeWarmup(self.task, model, tokenizer, self.warmup, seed=self.seed, report=report).run()


def lake_rows(seeds: Sequence[int], split_name: str) -> list[dict[str, Any]]:
    """Return a row of each board: its seed, from which the environment makes the prompt."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": ""}],
            "ability": "agent",
            "reward_model": {"style": "environment", "ground_truth": ""},
            "extra_info": {"index": index, "split": split_name, "seed": seed},
        }
        for index, seed in enumerate(seeds)
    ]
