# SPDX-License-Identifier: Apache-2.0
"""One directory with the whole toy task, made once per set of parameters, complete or absent.

The directory's name contains a hash of every parameter, so a changed default makes a new directory. It is
filled under a temporary name, its marker is written last, and then it is renamed: a reader that finds the
marker finds everything.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from recipe.async_pipeline.lab.tasks.data import write_parquet
from recipe.async_pipeline.lab.tasks.model import ModelSpec, MoeModelSpec
from recipe.async_pipeline.lab.tasks.task import TaskSpec, split_problems
from recipe.async_pipeline.lab.tasks.warmup import Addition, WarmupSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin, Qwen2ForCausalLM

MARKER = "toy.json"
REWARD_FILE = Path(__file__).with_name("reward.py")


@dataclass(frozen=True, kw_only=True)
class Spec(ABC):
    """All parameters of a task: a subclass adds its own, and fills the directory."""

    kind: ClassVar[str]
    """First word of the name of the directory."""
    reward: ClassVar[Path | None]
    """The file of the reward rule; None if the task needs no rule."""
    format: ClassVar[int] = 1
    """To be increased when the code produces a different result from the same parameters."""

    seed: int = 0

    @property
    @abstractmethod
    def label(self) -> str:
        """Name of the model's kind, in the name of the directory."""

    @abstractmethod
    def fill(self, work: Path, report: Callable[[str], None]) -> float:
        """Fill an existing, empty directory with `model`, `train.parquet` and `val.parquet`.

        Returns the success of the policy after warm-up. Raises WarmupFailed.
        """

    def parameters(self) -> dict[str, Any]:
        """Return all parameters and the format, as plain values."""
        return {"format": self.format, **dataclasses.asdict(self)}

    @property
    def dir_name(self) -> str:
        """Name of the directory: the parameters of most interest, then the hash of all."""
        text = json.dumps(self.parameters(), sort_keys=True)
        return f"{self.kind}-{self.label}-seed{self.seed}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, kw_only=True)
class TextSpec(Spec):
    """All parameters of a task for a language model: a subclass knows its data and its warm-up."""

    model: ModelSpec = field(default_factory=ModelSpec)

    @abstractmethod
    def write_data(self, work: Path) -> None:
        """Write `train.parquet` and `val.parquet`, and what else the task needs, into `work`."""

    @abstractmethod
    def warm_up(
        self, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, report: Callable[[str], None]
    ) -> float:
        """Train `model` in place; return the share of held-out prompts for which it succeeds."""

    def fill(self, work: Path, report: Callable[[str], None]) -> float:
        """Make data, tokenizer and warmed-up model; see `fill_toy`."""
        return fill_toy(self, work, report)

    @property
    def label(self) -> str:
        """Return whether the model has tied embeddings, and experts."""
        model = "tied" if self.model.tied else "untied"
        return f"moe-{model}" if isinstance(self.model, MoeModelSpec) else model


@dataclass(frozen=True, kw_only=True)
class ToySpec(TextSpec):
    """All parameters of the addition task."""

    kind: ClassVar[str] = "addition"
    reward: ClassVar[Path | None] = REWARD_FILE

    task: TaskSpec = field(default_factory=TaskSpec)
    warmup: WarmupSpec = field(default_factory=WarmupSpec)

    @classmethod
    def of(cls, *, seed: int, tied: bool, moe: bool = False) -> ToySpec:
        """Return the default toy with the choices that the command offers."""
        return cls(seed=seed, model=MoeModelSpec(tied=tied) if moe else ModelSpec(tied=tied))

    def write_data(self, work: Path) -> None:
        """Write a row of each sum."""
        split = split_problems(self.task, self.seed)
        write_parquet(split.train, "train", work / "train.parquet")
        write_parquet(split.val, "val", work / "val.parquet")

    def warm_up(
        self, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, report: Callable[[str], None]
    ) -> float:
        """Teach sums, then degrade the policy; return its accuracy on unseen sums."""
        split = split_problems(self.task, self.seed)
        return Addition(split, model, tokenizer, self.warmup, seed=self.seed, report=report).run()


@dataclass(frozen=True, kw_only=True)
class DistillSpec(ToySpec):
    """The addition task with a second model, in `teacher`, which has seen no errors."""

    kind: ClassVar[str] = "distill"

    warmup: WarmupSpec = field(default_factory=lambda: WarmupSpec(taught_accuracy=0.9, max_taught_steps=4000))
    teaching: WarmupSpec = field(
        default_factory=lambda: WarmupSpec(
            taught_accuracy=0.9, max_taught_steps=4000, slip_rate=0.0, num_slip_steps=1, min_accuracy=0.8
        )
    )

    def fill(self, work: Path, report: Callable[[str], None]) -> float:
        """Make the teacher, then all that a task has."""
        from recipe.async_pipeline.lab.tasks.model import make_model
        from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer

        tokenizer = make_tokenizer()
        teacher = make_model(self.model, tokenizer, self.seed + 1)
        success = replace(self, warmup=self.teaching).warm_up(teacher, tokenizer, report)
        report(f"the teacher is done: success {success:.2f} on unseen prompts")
        save_model(teacher, tokenizer, work / "teacher")
        return super().fill(work, report)


@dataclass(frozen=True, kw_only=True)
class ToyMeasurements:
    """Measurements taken while the toy was made."""

    accuracy_after_warmup: float
    """Share of held-out prompts for which the policy succeeds, sampled at temperature 1."""

    seconds: float
    """Time it took to make."""


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A finished toy."""

    dir: Path
    measured: ToyMeasurements
    reward: Path | None = REWARD_FILE

    def as_dict(self) -> dict[str, str | float]:
        """Return every path and measurement, as `task make --json` prints them."""
        return {
            "dir": str(self.dir),
            "model": str(self.dir / "model"),
            "train": str(self.dir / "train.parquet"),
            "val": str(self.dir / "val.parquet"),
            **({} if self.reward is None else {"reward": str(self.reward)}),
            **dataclasses.asdict(self.measured),
        }


# Fills an existing, empty directory and returns the accuracy after warm-up.
Fill = Callable[[Any, Path, Callable[[str], None]], float]


def fill_toy(spec: TextSpec, work: Path, report: Callable[[str], None]) -> float:
    """Make data, tokenizer and warmed-up model in `work`; the weights are saved in bf16, as they are served.

    Returns the success of the policy before it is rounded to bf16. Takes about half a minute on two cores.
    """
    from recipe.async_pipeline.lab.tasks.model import make_model
    from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer

    spec.write_data(work)
    tokenizer = make_tokenizer()
    model = make_model(spec.model, tokenizer, spec.seed)
    success = spec.warm_up(model, tokenizer, report)
    report(
        f"warm-up done: success {success:.2f} on unseen prompts, lowered on purpose by answers with errors, "
        "so that RL has something to learn"
    )

    save_model(model, tokenizer, work / "model")
    return success


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | ProcessorMixin, path: Path
) -> None:
    """Save a model in bf16, with its tokenizer or its processor."""
    import torch
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar

    # A progress bar for one shard would clutter the report.
    disable_progress_bar()
    try:
        model.to(torch.bfloat16).save_pretrained(path)
    finally:
        enable_progress_bar()
    tokenizer.save_pretrained(path)


def ensure_toy(spec: Spec, root: Path, *, report: Callable[[str], None], fill: Fill | None = None) -> Toy:
    """Return the toy of `spec` under `root`; make it first if it is absent or incomplete.

    Two processes may do this at the same time: the first to finish wins and the other uses its result.
    Raises WarmupFailed, and then leaves nothing behind.
    """
    final = root / spec.dir_name
    finished = find_finished(final)
    if finished is not None:
        return replace(finished, reward=spec.reward)

    report(f"making the model and the data of the task, once; later runs use {final}")
    started = time.monotonic()
    work = root / f".{spec.dir_name}.{uuid.uuid4().hex}.tmp"
    work.mkdir(parents=True)
    try:
        accuracy = spec.fill(work, report) if fill is None else fill(spec, work, report)
        measured = ToyMeasurements(
            accuracy_after_warmup=accuracy, seconds=round(time.monotonic() - started, 2)
        )
        marker = {"parameters": spec.parameters(), "measured": dataclasses.asdict(measured)}
        (work / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        return replace(_publish(work, final), reward=spec.reward)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def find_finished(final: Path) -> Toy | None:
    """Return the toy in `final`, or None if its marker is missing or incomplete."""
    try:
        measured = json.loads((final / MARKER).read_text(encoding="utf-8"))["measured"]
        return Toy(dir=final, measured=ToyMeasurements(**measured))
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def _publish(work: Path, final: Path) -> Toy:
    """Rename `work` to `final` unless a finished toy exists there; return the toy in `final`."""
    if find_finished(final) is None:
        shutil.rmtree(final, ignore_errors=True)
        try:
            work.rename(final)
        except OSError:
            # Another process published it between our check and our rename; its result is equivalent.
            if find_finished(final) is None:
                raise

    toy = find_finished(final)
    assert toy is not None, f"{final} was just published and has no marker"
    return toy
