# SPDX-License-Identifier: Apache-2.0
"""Each run script is a run that would start: its plan is printed, without a GPU and without its model."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import REPOSITORY

pytestmark = pytest.mark.real_engine
FOLDER = REPOSITORY / "run_scripts"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.sh") if path.name.startswith(("fsdp_", "megatron_")))


def explained(name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    return subprocess.run(
        ["bash", str(FOLDER / name), "--explain", *overrides],
        cwd=REPOSITORY,
        env={**environment, "ASYNC_PIPELINE_PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_scripts_are_the_table_of_engines_and_models() -> None:
    assert set(SCRIPTS) == {
        f"{trainer}_{engine}_{model}.sh"
        for trainer in ("fsdp", "megatron")
        for engine in ("vllm", "sglang")
        for model in ("dense", "moe")
    }


def test_the_mixture_with_sglang_has_two_replicas_of_two_and_a_batch_of_128() -> None:
    """The first layout that this pipeline had: tensor 1, pipeline 1, expert 4, SGLang tensor 2."""
    shown = explained("megatron_sglang_moe.sh").stdout
    assert "generate: 2 replicas of 2 devices" in shown and "128 prompts x" in shown


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_explains_itself(name: str) -> None:
    done = explained(name)
    assert done.returncode == 0, done.stderr
    assert "strategy        one_step_off" in done.stdout
    assert "train" in done.stdout and "generate" in done.stdout


def test_overrides_come_last() -> None:
    name = "megatron_vllm_moe.sh"
    assert "strategy        fully_async" in explained(name, "async_strategy=fully_async").stdout
    path = "actor_rollout_ref.actor.megatron.expert_model_parallel_size"
    refused = explained(name, f"{path}=3")
    assert refused.returncode == 2 and "must divide the 4 devices of pool train" in refused.stderr
