# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline task make`: print the directory of the toy model and its data; make it if absent."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from recipe.async_pipeline.console import echo
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.tasks.build import DistillSpec, Spec, ToySpec, ensure_toy
from recipe.async_pipeline.lab.tasks.model import ModelSpec

DEFAULT_ROOT = Path(".cache") / "toy"
MODELS = {"addition": ("dense", "moe"), "look": ("qwen2.5-vl", "qwen3-vl"), "words": ("smollm2",)}
"""The models of a task; any other task has a dense one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of `async-pipeline task`."""
    actions = parser.add_subparsers(dest="task_action", metavar="ACTION", required=True)
    text = "make a tokenizer, a warmed-up model and parquet data, or find the cached ones"
    make = actions.add_parser("make", help=text, description=text)
    make.add_argument(
        "--dir",
        dest="root",
        type=Path,
        default=DEFAULT_ROOT,
        metavar="DIR",
        help="parent of the directory, which is named after its parameters (default: %(default)s)",
    )

    make.add_argument(
        "--task",
        choices=("addition", "lake", "calculator", "image", "look", "words", "distill"),
        default="addition",
        help="which task (default: %(default)s)",
    )
    make.add_argument(
        "--model",
        choices=("dense", "moe", "qwen2.5-vl", "qwen3-vl", "smollm2"),
        help="for addition: dense (default) or moe, a mixture of experts; for look: qwen2.5-vl (default) or "
        "qwen3-vl; for words: smollm2",
    )
    make.add_argument(
        "--family",
        choices=("sd3", "flux"),
        default="sd3",
        help="for image: a pipeline of Stable Diffusion 3, or of FLUX (default: %(default)s)",
    )
    make.add_argument("--seed", type=int, default=0, help="seed of data and weights (default: %(default)s)")

    embeddings = make.add_mutually_exclusive_group()
    embeddings.add_argument(
        "--tied",
        dest="tied",
        action="store_true",
        help="share one tensor between embedding and output head (default)",
    )
    embeddings.add_argument("--untied", dest="tied", action="store_false", help="use two tensors")
    make.set_defaults(tied=True)

    make.add_argument("--json", dest="as_json", action="store_true", help="print every path as JSON")


def run(args: argparse.Namespace) -> int:
    """Make or find the directory and print it; progress goes to stderr."""
    root, report = args.root.resolve(), partial(echo, file=sys.stderr)
    if args.model not in (None, *MODELS.get(args.task, ("dense",))):
        raise ConfigError(
            f"--model must be {' or '.join(MODELS.get(args.task, ('dense',)))} with --task {args.task}, got "
            f"{args.model}; leave it out"
        )
    if args.task != "image" and args.family != "sd3":
        raise ConfigError(f"--family must be left out with --task {args.task}, got {args.family}")
    toy = ensure_toy(_spec_of(args), root, report=report)
    echo(json.dumps(toy.as_dict(), indent=2) if args.as_json else str(toy.dir))
    return 0


def _spec_of(args: argparse.Namespace) -> Spec:
    """Return the parameters of the task that the arguments choose."""
    if args.task == "lake":
        # The only task that needs gymnasium, an optional package.
        from recipe.async_pipeline.lab.tasks.lake_task.lake_build import LakeSpec

        return LakeSpec(seed=args.seed, model=ModelSpec(tied=args.tied))
    if args.task == "calculator":
        from recipe.async_pipeline.lab.tasks.calculator_task.calculator_build import CalculatorSpec

        return CalculatorSpec(seed=args.seed, model=ModelSpec(tied=args.tied))
    if args.task == "image":
        if find_spec("diffusers") is None:
            raise ConfigError("--task image requires diffusers; pip install async_pipeline[diffusion]")
        from recipe.async_pipeline.lab.tasks.image_task.image_build import ImageSpec
        from recipe.async_pipeline.lab.tasks.image_task.image_model import FluxModelSpec, ImageModelSpec

        return ImageSpec(seed=args.seed, model=FluxModelSpec() if args.family == "flux" else ImageModelSpec())
    if args.task == "look":
        return _look(args.seed, args.model)
    if args.task == "words":
        from recipe.async_pipeline.lab.tasks.words_task.words_build import WordsSpec

        return WordsSpec(seed=args.seed)
    if args.task == "distill":
        return DistillSpec(seed=args.seed, model=ModelSpec(tied=args.tied))
    return ToySpec.of(seed=args.seed, tied=args.tied, moe=args.model == "moe")


def _look(seed: int, family: Any) -> Spec:
    if find_spec("torchvision") is None:
        raise ConfigError(
            "--task look requires torchvision; install the release for your torch, as setup.sh does"
        )
    from recipe.async_pipeline.lab.tasks.look_task.look_build import LookSpec
    from recipe.async_pipeline.lab.tasks.look_task.look_model import LookModelSpec

    return LookSpec(seed=seed, model=LookModelSpec(family=family or "qwen2.5-vl"))
