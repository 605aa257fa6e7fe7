# SPDX-License-Identifier: Apache-2.0
"""The directory of the FrozenLake task: data with a seed in each row, tokenizer, and warmed-up model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from recipe.async_pipeline.toy.build import dir_name_of, save_model
from recipe.async_pipeline.toy.data import write_rows
from recipe.async_pipeline.toy.lake import LakeTask
from recipe.async_pipeline.toy.lake_warmup import WARMUP, warm_up_on_lake
from recipe.async_pipeline.toy.model import ModelSpec
from recipe.async_pipeline.toy.warmup import WarmupSpec

# Increase it when the code produces a different result from the same parameters.
FORMAT = 1
DATA_SOURCE = "async_pipeline/frozen_lake"


@dataclass(frozen=True, kw_only=True)
class LakeSpec:
    """All parameters of the task."""

    reward: ClassVar[Path | None] = None
    """The environment scores."""
    seed: int = 0
    task: LakeTask = field(default_factory=LakeTask)
    model: ModelSpec = field(default_factory=ModelSpec)
    warmup: WarmupSpec = WARMUP

    def parameters(self) -> dict[str, Any]:
        """Return all parameters and the format, as plain values."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @property
    def dir_name(self) -> str:
        """Name of the directory: the parameters of most interest, then the hash of all."""
        return dir_name_of(
            f"lake-{'tied' if self.model.tied else 'untied'}-seed{self.seed}", self.parameters()
        )


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


def fill_lake(spec: LakeSpec, work: Path, report: Callable[[str], None]) -> float:
    """Make data, tokenizer and warmed-up model in `work`; the weights are saved in bf16, as they are served.

    Returns the success of the policy before it is rounded to bf16. Takes about half a minute on two cores.
    """
    from recipe.async_pipeline.toy.model import make_model
    from recipe.async_pipeline.toy.tokenizer import make_tokenizer

    report(f"making {spec.dir_name}")
    train, val = spec.task.seeds(spec.seed)
    write_rows(lake_rows(train, "train"), work / "train.parquet")
    write_rows(lake_rows(val, "val"), work / "val.parquet")
    tokenizer = make_tokenizer()
    model = make_model(spec.model, tokenizer, spec.seed)
    success = warm_up_on_lake(model, tokenizer, spec.task, spec.warmup, seed=spec.seed, report=report)
    report(
        f"warm-up done: success {success:.2f} on unseen boards, degraded on purpose so that RL has something "
        "to learn"
    )
    save_model(model, tokenizer, work / "model")
    return success
