# SPDX-License-Identifier: Apache-2.0
"""The toy task, made once for all jobs; Ray nodes on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ray.cluster_utils import Cluster

from tests.e2e.job import ROOT


def _make(*options: str) -> Path:
    command = [sys.executable, "-m", "recipe.async_pipeline", "task", "make", *options]
    return Path(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip())


@pytest.fixture(scope="session")
def tied_task() -> Path:
    return _make("--tied")


@pytest.fixture(scope="session")
def untied_task() -> Path:
    return _make("--untied")


class Nodes(NamedTuple):
    """A cluster of two nodes."""

    cluster: Any
    second: Any

    @property
    def overrides(self) -> list[str]:
        """What has a job run there."""
        return [
            f"++ray_kwargs.ray_init.address={self.cluster.address}",
            "ray_kwargs.ray_init.num_gpus=null",
            "ray_kwargs.ray_init.num_cpus=null",
            "~ray_kwargs.ray_init.include_dashboard",
        ]


TwoNodes = Callable[[Path, int, int], Nodes]


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoNodes]:
    """Starts two nodes for a task, with so many devices each."""
    made: list[Any] = []

    def start(task: Path, first: int, second: int) -> Nodes:
        # What the configuration refers to has to be known where its nodes are started.
        monkeypatch.setenv("ASYNC_PIPELINE_TASK", str(task))
        monkeypatch.setenv("ASYNC_PIPELINE_RUN", "run")
        made.append(Cluster(initialize_head=True, head_node_args={"num_cpus": 64, "num_gpus": first, "include_dashboard": False}))
        return Nodes(made[0], made[0].add_node(num_cpus=64, num_gpus=second))

    yield start
    for cluster in made:
        cluster.shutdown()
