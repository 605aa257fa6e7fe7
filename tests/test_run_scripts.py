# SPDX-License-Identifier: Apache-2.0
"""Each run script is a run that would start: its plan is printed, without a GPU and without its model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from tests import HANG_S, REPOSITORY

pytestmark = pytest.mark.real_engine
FOLDER = REPOSITORY / "run_scripts"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.sh") if path.name.startswith(("fsdp_", "megatron_")))


MIXTURE = "megatron_vllm_moe.sh"
RANKS = "actor_rollout_ref.actor.megatron.expert_model_parallel_size"
COMMANDS: list[tuple[str, ...]] = [
    *((name,) for name in SCRIPTS),
    (MIXTURE, "async_strategy=fully_async"),
    (MIXTURE, f"{RANKS}=3"),
]
"""Scripts with overrides, all of which are explained by one process."""


class Explained(NamedTuple):
    """What a script printed with --explain."""

    status: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Explained]:
    """Run each command with a stand-in for Python, then what it would have run with the real one."""
    folder = tmp_path_factory.mktemp("python")
    standin, words = folder / "python", folder / "words"
    standin.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > '{words}'\n", encoding="utf-8")
    standin.chmod(0o700)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    calls = []
    for name, *overrides in COMMANDS:
        subprocess.run(
            ["bash", str(FOLDER / name), "--explain", *overrides],
            env={**environment, "ASYNC_PIPELINE_PYTHON": str(standin)},
            check=True,
        )
        module, package, *call = words.read_text(encoding="utf-8").splitlines()
        assert [module, package] == ["-m", "recipe.async_pipeline"]
        calls.append(call)

    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.explained_commands"],
        cwd=REPOSITORY,
        env={**environment, "HF_HUB_OFFLINE": "1"},
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads(done.stdout.rpartition("\nREPORT ")[2])
    return {command: Explained(*report) for command, report in zip(COMMANDS, reports, strict=True)}


def test_the_scripts_are_the_table_of_engines_and_models() -> None:
    assert set(SCRIPTS) == {
        f"{trainer}_{engine}_{model}.sh"
        for trainer in ("fsdp", "megatron")
        for engine in ("vllm", "sglang")
        for model in ("dense", "moe")
    }


def test_the_mixture_with_sglang_has_two_replicas_of_two_and_a_batch_of_128(
    explained: dict[tuple[str, ...], Explained],
) -> None:
    """The first layout that this pipeline had: tensor 1, pipeline 1, expert 4, SGLang tensor 2."""
    shown = explained["megatron_sglang_moe.sh",].stdout
    assert "generate: 2 replicas of 2 devices" in shown and "128 prompts x" in shown
    assert "Megatron, expert-parallel 4, data-parallel 4" in shown
    assert "tensor-parallel" not in shown and "pipeline-parallel" not in shown


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_explains_itself(name: str, explained: dict[tuple[str, ...], Explained]) -> None:
    done = explained[name,]
    assert done.status == 0, done.stderr
    assert "strategy        one_step_off" in done.stdout
    assert "train" in done.stdout and "generate" in done.stdout


def test_overrides_come_last(explained: dict[tuple[str, ...], Explained]) -> None:
    assert "strategy        fully_async" in explained[MIXTURE, "async_strategy=fully_async"].stdout
    refused = explained[MIXTURE, f"{RANKS}=3"]
    assert refused.status == 2 and "must divide the 4 devices of pool train" in refused.stderr
