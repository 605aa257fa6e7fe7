# SPDX-License-Identifier: Apache-2.0
"""The directory of the calculator task: data, tokenizer, warmed-up model, and the file of its tool."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from recipe.async_pipeline.toy.build import dir_name_of, save_model
from recipe.async_pipeline.toy.calculator import CalculatorTask
from recipe.async_pipeline.toy.calculator_warmup import CALCULATOR_WARMUP, warm_up_with_calculator
from recipe.async_pipeline.toy.data import write_rows
from recipe.async_pipeline.toy.model import ModelSpec
from recipe.async_pipeline.toy.task import Problem
from recipe.async_pipeline.toy.tokenizer import prompt_messages
from recipe.async_pipeline.toy.warmup import WarmupSpec

# Increase it when the code produces a different result from the same parameters.
FORMAT = 1
DATA_SOURCE = "async_pipeline/calculator"
REWARD_FILE = Path(__file__).with_name("calculator_reward.py")
TOOLS = Path(__file__).parents[1] / "verl_bridge" / "calculator_tool.py"
"""The file that verl loads the tool from; the directory of the task has a copy, `tools.py`."""


@dataclass(frozen=True, kw_only=True)
class CalculatorSpec:
    """All parameters of the task."""

    reward: ClassVar[Path | None] = REWARD_FILE
    seed: int = 0
    task: CalculatorTask = field(default_factory=CalculatorTask)
    model: ModelSpec = field(default_factory=ModelSpec)
    warmup: WarmupSpec = CALCULATOR_WARMUP

    def parameters(self) -> dict[str, Any]:
        """Return all parameters and the format, as plain values."""
        tool = TOOLS.read_text(encoding="utf-8")
        return {"format": FORMAT, "tool": tool, **dataclasses.asdict(self)}

    @property
    def dir_name(self) -> str:
        """Name of the directory: the parameters of most interest, then the hash of all."""
        kind = "tied" if self.model.tied else "untied"
        return dir_name_of(f"calculator-{kind}-seed{self.seed}", self.parameters())


def calculator_rows(problems: Sequence[Problem], split_name: str) -> list[dict[str, Any]]:
    """Return a row of each sum."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": prompt_messages(problem),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": index, "split": split_name},
        }
        for index, problem in enumerate(problems)
    ]


def fill_calculator(spec: CalculatorSpec, work: Path, report: Callable[[str], None]) -> float:
    """Make data, tokenizer, warmed-up model and tool in `work`; the weights are saved in bf16, as they are
    served.

    Returns the share of sums that the policy does right before it is rounded to bf16.
    """
    from recipe.async_pipeline.toy.model import make_model
    from recipe.async_pipeline.toy.tokenizer import make_tokenizer

    report(f"making {spec.dir_name}")
    train, val = spec.task.problems(spec.seed)
    write_rows(calculator_rows(train, "train"), work / "train.parquet")
    write_rows(calculator_rows(val, "val"), work / "val.parquet")
    shutil.copyfile(TOOLS, work / "tools.py")
    tokenizer = make_tokenizer()
    model = make_model(spec.model, tokenizer, spec.seed)
    right = warm_up_with_calculator(model, tokenizer, spec.task, spec.warmup, seed=spec.seed, report=report)
    report(
        f"warm-up done: {right:.2f} of unseen sums are right; degraded on purpose so that RL has something "
        "to learn"
    )
    save_model(model, tokenizer, work / "model")
    return right
