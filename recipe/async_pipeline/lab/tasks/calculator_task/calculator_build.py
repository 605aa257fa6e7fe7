# SPDX-License-Identifier: Apache-2.0
"""The directory of the calculator task: data, tokenizer, warmed-up model, and the file of its tool."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from recipe.async_pipeline.lab.tasks.build import TextSpec
from recipe.async_pipeline.lab.tasks.calculator_task.calculator import CalculatorTask
from recipe.async_pipeline.lab.tasks.calculator_task.calculator_warmup import (
    CALCULATOR_WARMUP,
    CalculatorWarmup,
)
from recipe.async_pipeline.lab.tasks.data import make_row, write_rows
from recipe.async_pipeline.lab.tasks.task import Problem
from recipe.async_pipeline.lab.tasks.warmup import WarmupSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

DATA_SOURCE = "async_pipeline/calculator"
"""Validation reports both lengths by themselves: this with the suffix `_short` or `_long`."""
REWARD_FILE = Path(__file__).with_name("calculator_reward.py")
TOOLS = Path(__file__).with_name("calculator_tool.py")
"""The file that verl loads the tool from; the directory of the task has a copy, `tools.py`."""


@dataclass(frozen=True, kw_only=True)
class CalculatorSpec(TextSpec):
    """All parameters of the task."""

    kind: ClassVar[str] = "calculator"
    reward: ClassVar[Path | None] = REWARD_FILE

    task: CalculatorTask = field(default_factory=CalculatorTask)
    warmup: WarmupSpec = CALCULATOR_WARMUP

    def parameters(self) -> dict[str, Any]:
        """Return all parameters, the format and the text of the tool, as plain values."""
        return {"tool": TOOLS.read_text(encoding="utf-8"), **super().parameters()}

    def write_data(self, work: Path) -> None:
        """Write a row of each sum, and the tool."""
        train, val = self.task.problems(self.seed)
        for split_name, problems in (("train", train), ("val", val)):
            rows = [
                make_row(problem, index, split_name, self.source_of(problem))
                for index, problem in enumerate(problems)
            ]
            write_rows(rows, work / f"{split_name}.parquet")
        shutil.copyfile(TOOLS, work / "tools.py")

    def source_of(self, problem: Problem) -> str:
        """Return the data source of a sum, which names its length."""
        return f"{DATA_SOURCE}_{'long' if self.task.is_long(problem) else 'short'}"

    def warm_up(
        self, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, report: Callable[[str], None]
    ) -> float:
        """Teach sums with the tool, then degrade the policy; return its success on unseen sums."""
        given = (self.task, model, tokenizer, self.warmup)
        return CalculatorWarmup(*given, seed=self.seed, report=report).run()
