# SPDX-License-Identifier: Apache-2.0
"""The Python of other versions of an engine, unpacked from its wheels, on a machine without a GPU.

A tree is a folder such as `vllm-0.24.0` with the package in it. It is looked for in the folder that
ASYNC_PIPELINE_ENGINE_TREES names, or else in `.cache/engines`; `run_scripts/engine_trees.sh` fetches it.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from tests import REPOSITORY

FOLDER, TREE = "ASYNC_PIPELINE_ENGINE_TREES", "ASYNC_PIPELINE_ENGINE_TREE"
"""Variables of the environment: where trees are, and the one that a program runs with."""


def tree_of(engine: str, version: str) -> Path:
    """Return the folder to put on the path for a version of an engine; fetch it if it is not there."""
    folder = Path(os.environ.get(FOLDER) or REPOSITORY / ".cache" / "engines")
    tree = folder / f"{engine}-{version}"
    if not (tree / engine).is_dir():
        script = REPOSITORY / "run_scripts" / "engine_trees.sh"
        environment = {**os.environ, "ASYNC_PIPELINE_TEST_PYTHON": sys.executable}
        subprocess.run(["bash", str(script), tree.name], env=environment, check=True)
    return tree


def run_with(tree: Path | None, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module of this repository with the engine of a tree, or with the installed one.

    The module must call `use_tree` before it imports the engine.
    """
    path = [str(REPOSITORY)] if tree is None else [str(tree), str(REPOSITORY)]
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            TREE: "" if tree is None else tree.name,
            "VERL_PLATFORM": "cpu",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )


def use_tree() -> None:
    """Give the engine on the path the version of its tree, as a build for the CPU."""
    engine, _, version = os.environ.get(TREE, "").rpartition("-")
    if not engine:
        return
    asked = importlib.metadata.version

    def of_tree(distribution_name: str) -> str:
        return f"{version}+cpu" if distribution_name == engine else asked(distribution_name)

    importlib.metadata.version = of_tree
