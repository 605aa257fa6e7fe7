# SPDX-License-Identifier: Apache-2.0
"""The directory of the image task: prompts, and a warmed-up pipeline of Stable Diffusion 3 or FLUX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from recipe.async_pipeline.errors import WarmupFailed
from recipe.async_pipeline.lab.tasks.build import Spec
from recipe.async_pipeline.lab.tasks.data import write_rows
from recipe.async_pipeline.lab.tasks.image_task.image import SCENES, WORDS, ImageTask, image_rows
from recipe.async_pipeline.lab.tasks.image_task.image_model import MAX_TOKENS, ImageModelSpec, make_pipeline
from recipe.async_pipeline.lab.tasks.image_task.image_warmup import (
    ImageWarmupSpec,
    mean_score,
    train_flow,
    train_vae,
)

REWARD_FILE = Path(__file__).with_name("image_reward.py")


@dataclass(frozen=True, kw_only=True)
class ImageSpec(Spec):
    """All parameters of the task."""

    kind: ClassVar[str] = "image"
    reward: ClassVar[Path | None] = REWARD_FILE

    model: ImageModelSpec = field(default_factory=ImageModelSpec)
    task: ImageTask = field(default_factory=ImageTask)
    warmup: ImageWarmupSpec = field(default_factory=ImageWarmupSpec)

    @property
    def label(self) -> str:
        return f"{self.model.family}-{self.model.side}px"

    def fill(self, work: Path, report: Callable[[str], None]) -> float:
        """Make data and pipeline in `work`; return the mean score of its samples.

        Raises WarmupFailed if RL could not start from them.
        """
        import torch

        from recipe.async_pipeline.diffusion.model_folder import FrozenParts, ModelFolder

        train, val = self.task.scenes(self.seed)
        write_rows(image_rows(train, "train"), work / "train.parquet")
        write_rows(image_rows(val, "val"), work / "val.parquet")

        threads = torch.get_num_threads()
        torch.set_num_threads(self.warmup.num_threads)
        try:
            pipeline = make_pipeline(self.model, WORDS, self.seed)
            train_vae(pipeline.vae, self.warmup, seed=self.seed, report=report)
            frozen = FrozenParts(pipeline, MAX_TOKENS)
            conditions = frozen.encode([scene.prompt for scene in SCENES])
            train_flow(
                pipeline,
                conditions,
                self.task,
                self.warmup,
                seed=self.seed,
                report=report,
            )
            save_pipeline(pipeline, work / "model")
            folder = ModelFolder(work / "model")
            score = mean_score(folder, pipeline.transformer, frozen, self.warmup, seed=self.seed)
        finally:
            torch.set_num_threads(threads)
        report(f"warm-up done: mean score {score:.2f}, lowered on purpose so that RL has something to learn")
        if score < self.warmup.min_score:
            raise WarmupFailed(
                f"samples score {score:.2f}, less than {self.warmup.min_score}; raise warmup flow_steps"
            )
        return score


def save_pipeline(pipeline: Any, path: Path) -> None:
    """Save a pipeline without progress bars, which would clutter the report."""
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar

    disable_progress_bar()
    try:
        pipeline.save_pretrained(path)
    finally:
        enable_progress_bar()
