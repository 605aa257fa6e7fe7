# SPDX-License-Identifier: Apache-2.0
"""The toy task, made once for all jobs; Ray nodes on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ray

from recipe.async_pipeline.lab.tasks.words_task.words_build import PACKAGE
from recipe.async_pipeline.verl_bridge.cpu.cpu_overrides import install
from tests import HANG_S
from tests.e2e.job import ROOT
from tests.fakes.ray_nodes import add_node, start_cluster


def make_task(*options: str) -> Path:
    """Return the directory of a task, made with these options if it is absent."""
    command = [sys.executable, "-m", "recipe.async_pipeline", "task", "make", *options]
    return Path(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip())


@pytest.fixture(scope="session")
def tied_task() -> Path:
    return make_task("--tied")


@pytest.fixture(scope="session")
def untied_task() -> Path:
    return make_task("--untied")


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a task with a model alone, as the untied toy's is before its warm-up."""
    from recipe.async_pipeline.lab.tasks.build import save_model
    from recipe.async_pipeline.lab.tasks.model import ModelSpec, make_model
    from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("untied"), make_tokenizer()
    save_model(make_model(ModelSpec(tied=False), tokenizer, seed=0), tokenizer, folder / "model")
    return folder


@pytest.fixture(scope="session")
def moe_task() -> Path:
    return make_task("--model", "moe")


@pytest.fixture(scope="session")
def look_task() -> Path:
    """Return the directory of a task with pictures, for a vision-language model."""
    return make_task("--task", "look")


@pytest.fixture(scope="session")
def qwen3_vl_task() -> Path:
    """Return the directory of the same task for a Qwen3-VL."""
    return make_task("--task", "look", "--model", "qwen3-vl")


@pytest.fixture(scope="session")
def words_task() -> Path:
    """Return the directory of a task with a pretrained model of 135 million parameters."""
    if find_spec(PACKAGE) is None:
        pytest.skip(f"{PACKAGE} is not installed; `smoke_cpu.sh --task words` installs it")
    return make_task("--task", "words")


@pytest.fixture(scope="session")
def lake_task() -> Path:
    pytest.importorskip("gymnasium")
    return make_task("--task", "lake")


@pytest.fixture(scope="session")
def untrained_lake_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a lake task whose policy has seen some actions, and seldom finds the goal."""
    pytest.importorskip("gymnasium")
    from recipe.async_pipeline.lab.tasks.build import ensure_toy
    from recipe.async_pipeline.lab.tasks.lake_task.lake_build import LakeSpec
    from recipe.async_pipeline.lab.tasks.lake_task.lake_warmup import WARMUP

    warmup = replace(WARMUP, taught_accuracy=0.0, num_slip_steps=1, min_accuracy=0.0)
    return ensure_toy(LakeSpec(warmup=warmup), tmp_path_factory.mktemp("lake"), report=lambda line: None).dir


class Nodes:
    """A Ray cluster on this machine. Who starts a job is on its first node."""

    def __init__(self, devices: int) -> None:
        install()  # the nodes fork the workers of a job
        self._cluster = start_cluster(num_cpus=64, num_gpus=devices)
        self._number = 1

    @property
    def overrides(self) -> list[str]:
        """What has a job run there."""
        return [
            f"++ray_kwargs.ray_init.address={self._cluster.address}",
            "ray_kwargs.ray_init.num_gpus=null",
            "ray_kwargs.ray_init.num_cpus=null",
            "~ray_kwargs.ray_init.include_dashboard",
        ]

    def add(self, devices: int) -> Any:
        """Return a second node with its own address."""
        self._number += 1
        address = f"127.0.0.{self._number}"
        return add_node(
            self._cluster,
            num_cpus=64,
            num_gpus=devices,
            node_ip_address=address,
            resources={self._name: 1},
        )

    @property
    def _name(self) -> str:
        """A resource of the node that was added last, and of no other."""
        return f"node_{self._number}"

    def keep_free(self) -> Callable[[], None]:
        """Until what this returns is called, nothing that asks for a CPU gets onto the node that was added
        last.
        """
        ray.init(address=self._cluster.address, log_to_driver=False)
        occupied = ray.util.placement_group([{"CPU": 64, self._name: 1}])
        ray.get(occupied.ready(), timeout=HANG_S)

        def release() -> None:
            ray.util.remove_placement_group(occupied)
            ray.shutdown()

        return release

    def lose(self, node: Any) -> None:
        """All of its processes at once, and it says nothing."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


StartNodes = Callable[..., Nodes]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartNodes]:
    """Starts nodes for a task, with so many devices each."""
    made: list[Nodes] = []

    def start(task: Path, first: int, *others: int) -> Nodes:
        # What the configuration refers to has to be known where its nodes are started.
        monkeypatch.setenv("ASYNC_PIPELINE_TASK", str(task))
        monkeypatch.setenv("ASYNC_PIPELINE_RUN", "run")
        made.append(Nodes(first))
        for devices in others:
            made[-1].add(devices)
        return made[-1]

    yield start
    for cluster in made:
        cluster.close()
