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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe.async_pipeline.toy.model import ModelSpec
from recipe.async_pipeline.toy.task import TaskSpec
from recipe.async_pipeline.toy.warmup import WarmupSpec

# Increase it when the code produces a different result from the same parameters.
FORMAT = 1
MARKER = "toy.json"
REWARD_FILE = Path(__file__).with_name("reward.py")


@dataclass(frozen=True, kw_only=True)
class ToySpec:
    """All parameters of the toy."""

    seed: int = 0
    task: TaskSpec = field(default_factory=TaskSpec)
    model: ModelSpec = field(default_factory=ModelSpec)
    warmup: WarmupSpec = field(default_factory=WarmupSpec)

    @classmethod
    def of(cls, *, seed: int, tied: bool) -> ToySpec:
        """Return the default toy with the two choices that the command offers."""
        return cls(seed=seed, model=ModelSpec(tied=tied))

    def parameters(self) -> dict[str, Any]:
        """Return all parameters and the format, as plain values."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @property
    def dir_name(self) -> str:
        """Name of the directory: the parameters of most interest, then the hash of all."""
        text = json.dumps(self.parameters(), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"addition-{'tied' if self.model.tied else 'untied'}-seed{self.seed}-{digest}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements taken while the toy was made."""

    accuracy_after_warmup: float
    """Share of validation sums that the policy answers correctly, sampled at temperature 1."""

    seconds: float
    """Time it took to make."""


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A finished toy."""

    dir: Path
    measured: Measured

    def as_dict(self) -> dict[str, str | float]:
        """Return every path and measurement, as `task make --json` prints them."""
        return {
            "dir": str(self.dir),
            "model": str(self.dir / "model"),
            "train": str(self.dir / "train.parquet"),
            "val": str(self.dir / "val.parquet"),
            "reward": str(REWARD_FILE),
            **dataclasses.asdict(self.measured),
        }


# Fills an existing, empty directory and returns the accuracy after warm-up.
Fill = Callable[[ToySpec, Path, Callable[[str], None]], float]


def ensure_toy(spec: ToySpec, root: Path, *, report: Callable[[str], None], fill: Fill | None = None) -> Toy:
    """Return the toy of `spec` under `root`; make it first if it is absent or incomplete.

    Two processes may do this at the same time: the first to finish wins and the other uses its result.
    Raises WarmupFailed, and then leaves nothing behind.
    """
    final = root / spec.dir_name
    finished = find_finished(final)
    if finished is not None:
        return finished

    started = time.monotonic()
    work = root / f".{spec.dir_name}.{uuid.uuid4().hex}.tmp"
    work.mkdir(parents=True)
    try:
        accuracy = (fill or fill_toy)(spec, work, report)
        measured = Measured(accuracy_after_warmup=accuracy, seconds=round(time.monotonic() - started, 2))
        marker = {"parameters": spec.parameters(), "measured": dataclasses.asdict(measured)}
        (work / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        return _publish(work, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def find_finished(final: Path) -> Toy | None:
    """Return the toy in `final`, or None if its marker is missing or incomplete."""
    try:
        measured = json.loads((final / MARKER).read_text(encoding="utf-8"))["measured"]
        return Toy(dir=final, measured=Measured(**measured))
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


def fill_toy(spec: ToySpec, work: Path, report: Callable[[str], None]) -> float:
    """Make data, tokenizer and warmed-up model in `work`; the weights are saved in bf16, as they are served.

    Returns the accuracy of the policy before it is rounded to bf16. Takes about half a minute on two cores.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar

    from recipe.async_pipeline.toy.data import write_parquet
    from recipe.async_pipeline.toy.model import make_model
    from recipe.async_pipeline.toy.task import split_problems
    from recipe.async_pipeline.toy.tokenizer import make_tokenizer
    from recipe.async_pipeline.toy.warmup import warm_up

    report(f"making {spec.dir_name}")
    split = split_problems(spec.task, spec.seed)
    write_parquet(split.train, "train", work / "train.parquet")
    write_parquet(split.val, "val", work / "val.parquet")
    tokenizer = make_tokenizer()
    model = make_model(spec.model, tokenizer, spec.seed)
    accuracy = warm_up(model, tokenizer, split, spec.warmup, seed=spec.seed, report=report)
    report(
        f"warm-up done: accuracy {accuracy:.2f} on unseen sums, degraded on purpose so that RL has something "
        "to learn"
    )

    # A progress bar for one shard would clutter the report.
    disable_progress_bar()
    try:
        model.to(torch.bfloat16).save_pretrained(work / "model")
    finally:
        enable_progress_bar()
    tokenizer.save_pretrained(work / "model")
    return accuracy
