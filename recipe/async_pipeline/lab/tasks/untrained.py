# SPDX-License-Identifier: Apache-2.0
"""Models of the kinds that users train, with random weights and the tokenizer of the addition task.

    python -m recipe.async_pipeline.lab.tasks.untrained FOLDER NAME...

An engine takes another path for each of them: another model runner, other kernels, another loader. Their
heads have a size that attention kernels of GPUs take.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from recipe.async_pipeline.lab.tasks.build import save_model
from recipe.async_pipeline.lab.tasks.model import ModelSpec, MoeModelSpec, Qwen3ModelSpec, make_model
from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer

UNTRAINED: Mapping[str, ModelSpec] = {
    "qwen2": ModelSpec(hidden_size=256, head_dim=64, tied=False),
    "qwen3": Qwen3ModelSpec(hidden_size=256, head_dim=64, tied=False),
    "experts": MoeModelSpec(hidden_size=256, head_dim=64, tied=False),
}


def save_untrained(name: str, folder: Path) -> Path:
    """Write a model into a folder of its name, and return that. Raises KeyError if there is no such model."""
    path = folder / name
    tokenizer = make_tokenizer()
    save_model(make_model(UNTRAINED[name], tokenizer, seed=0), tokenizer, path)
    return path


def main(arguments: Sequence[str]) -> int:
    """Write the named models."""
    parser = argparse.ArgumentParser(prog="toy.untrained")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", choices=tuple(UNTRAINED))
    args = parser.parse_args(arguments)
    for name in args.names:
        save_untrained(name, args.folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
