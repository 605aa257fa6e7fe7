# SPDX-License-Identifier: Apache-2.0
"""Which steps a machine can run, and what they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from recipe.async_pipeline.lab.bench.weight_sync_jobs import Engines, overrides_of
from recipe.async_pipeline.lab.gpu_kit import catalogue, steps
from recipe.async_pipeline.lab.gpu_kit.steps import Options
from recipe.async_pipeline.lab.tasks.untrained import UNTRAINED
from tests import REPOSITORY

CONFIGS = REPOSITORY / "configs"


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(
        device="cuda", devices=4, model=None, configs=CONFIGS, task=lambda: Path("/task"), folder=tmp_path
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Only the named packages are installed."""

    def only(*names: str) -> None:
        monkeypatch.setattr(steps, "find_spec", lambda name: object() if name in names else None)

    return only


def why_not(options: Options) -> dict[str, str | None]:
    return {step.name: steps.lacking(step.needs) or step.missing(options) for step in catalogue.STEPS}


def test_torch_alone_runs_the_steps_without_a_run(options: Options, installed: Callable[..., None]) -> None:
    installed(*catalogue.ARENA)
    found = why_not(options)
    assert [name for name, why in found.items() if why is None] == ["environment", "copies", "delivery"]
    assert found["job"] == "needs verl, ray, vllm, transformers, hydra, omegaconf, pyarrow"
    assert found["megatron"] == f"{found['job']}, megatron.core"


def test_without_torch_only_the_environment_is_looked_at(
    options: Options, installed: Callable[..., None]
) -> None:
    installed()
    assert [name for name, why in why_not(options).items() if why is None] == ["environment"]


def test_a_job_on_gpus_requires_two(options: Options, installed: Callable[..., None]) -> None:
    installed(*catalogue.RUN, "megatron.core")
    assert why_not(options)["job"] is None and why_not(options)["megatron"] is None
    assert "but there is 1" in str(why_not(replace(options, devices=1))["job"])


def test_an_engine_gets_versions_of_each_kind_of_model(
    options: Options, installed: Callable[..., None]
) -> None:
    cpu = replace(options, device="cpu", devices=2)
    installed("torch", "transformers")
    assert why_not(options)["engine"] == "needs vllm or sglang"
    installed("torch", "transformers", "sglang")
    assert why_not(options)["engine"] is None and str(why_not(cpu)["engine"]).startswith("needs msgspec")
    assert "sglang" in catalogue.engine(options, options.folder / "engine.json")
    installed("torch", "transformers", "vllm")
    assert "needs msgspec" in str(why_not(options)["engine"]), "a worker of vLLM imports verl"
    installed(*catalogue.RUN)
    assert why_not(options)["engine"] is None and why_not(cpu)["engine"] is None
    command = catalogue.engine(options, Path("e"))
    assert [str(options.folder / "models" / name) in command for name in UNTRAINED] == [True] * len(UNTRAINED)
    assert command[command.index("--ranks") + 1] == "2" and command[command.index("--engine") + 1] == "vllm"
    alone = catalogue.engine(replace(options, devices=1), Path("e"))
    assert alone[alone.index("--ranks") + 1] == "1"


def test_the_models_are_written_before_a_command_runs(options: Options, tmp_path: Path) -> None:
    assert tuple(UNTRAINED) == catalogue.UNTRAINED
    first, *_, last = command = catalogue.with_models(tmp_path, ["qwen3"], ("the command", "--option"))
    assert (first, last) == ("bash", "--option")
    made = command.index("recipe.async_pipeline.lab.tasks.untrained")
    assert list(command[made + 1 : made + 3]) == [str(tmp_path), "qwen3"]
    chained = [*command[:4], "echo", "made", *command[made + 3 :]]
    assert chained[-2:] == ["the command", "--option"]
    for name in ("qwen3", "experts"):
        job = next(step for step in catalogue.STEPS if step.name == name).command(
            options, tmp_path / "j.json"
        )
        assert f"actor_rollout_ref.model.path={options.folder / 'models' / name}" in job


def test_weight_updates_are_measured_next_to_verls_manager(
    options: Options, installed: Callable[..., None]
) -> None:
    cpu = replace(options, device="cpu", devices=2)
    installed(*catalogue.ARENA)
    assert "needs verl" in str(why_not(options)["weight-updates"])
    installed(*catalogue.RUN)
    assert why_not(cpu)["weight-updates"] is None
    assert str(why_not(options)["weight-updates"]).startswith("needs cupy")
    installed(*catalogue.RUN, "cupy")
    assert why_not(options)["weight-updates"] is None
    assert "but there is 1" in str(why_not(replace(options, devices=1))["weight-updates"])
    for chosen in (options, cpu):
        command = catalogue.weight_updates(chosen, options.folder / "w.json")
        assert command[command.index("--device") + 1] == chosen.device
        assert "--ways" not in command, "all of them, verl's manager included"


def test_the_wheel_has_no_configs(options: Options, installed: Callable[..., None], tmp_path: Path) -> None:
    installed(*catalogue.RUN)
    assert "run it from a clone" in str(why_not(replace(options, configs=tmp_path))["job"])


@pytest.mark.parametrize(
    ("devices", "training", "generation", "parallel"),
    [(2, 1, 1, 1), (4, 2, 2, 2), (7, 3, 4, 2), (40, 8, 8, 2)],
)
def test_half_of_the_devices_train(
    options: Options, devices: int, training: int, generation: int, parallel: int
) -> None:
    settings = catalogue.on_gpus(replace(options, devices=devices))
    assert f"trainer.n_gpus_per_node={training}" in settings
    assert f"actor_rollout_ref.rollout.n_gpus_per_node={generation}" in settings
    assert f"actor_rollout_ref.rollout.tensor_model_parallel_size={parallel}" in settings


def test_a_checkpoint_of_the_user_takes_the_place_of_the_toy_model(options: Options, tmp_path: Path) -> None:
    for device in ("cuda", "cpu"):
        chosen = replace(options, device=device, model="/models/mine")
        assert "actor_rollout_ref.model.path=/models/mine" in catalogue.job(chosen, tmp_path / "job.json")


EXPLAIN = """
import contextlib, io, json, sys
from recipe.async_pipeline.cli.main import main
for settings in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(["explain", *settings])
    print("REPORT", json.dumps([status, out.getvalue()]))
"""


@pytest.mark.slow
def test_the_settings_of_the_jobs_on_gpus_are_accepted(options: Options) -> None:
    pytest.importorskip("verl")
    jobs = {
        catalogue.job: "1 replica of 2 devices",
        catalogue.experts_job: "1 replica of 2 devices",
        catalogue.megatron_job: "1 replica of 2 devices",
        catalogue.ladder: "2 replicas of 1 device",
    }
    asked = []
    for step in jobs:
        # It is on the machine with GPUs, not here.
        command = step(replace(options, model="Qwen/Qwen3-8B"), options.folder / "job.json")
        settings = [one for one in command[command.index("--config-path") :] if one != "+async_pipeline=True"]
        asked.append([*settings, "actor_rollout_ref.rollout.name=vllm"])
    updates = overrides_of("dual_buffer", options.folder, Engines(1, device="cuda"))
    # The small task is not made for it.
    updates += ["actor_rollout_ref.model.path=Qwen/Qwen3-8B"]
    asked.append(["--config-path", str(CONFIGS), "--config-name", "smoke_cpu", *updates])

    names = [*(step.__name__ for step in jobs), "weight updates"]
    for name, replicas, found in zip(
        names, [*jobs.values(), "1 replica of 1 device"], explained(asked), strict=True
    ):
        assert f"generate: {replicas}" in found, name


def explained(asked: Sequence[Sequence[str]]) -> list[str]:
    """Return what `explain` prints for each of these settings where no CPU platform is chosen."""
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    done = subprocess.run(
        [sys.executable, "-c", EXPLAIN, json.dumps(asked)],
        env={**environment, "PYTHONPATH": str(REPOSITORY), "ASYNC_PIPELINE_TASK": "/task"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.removeprefix("REPORT ") for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    found = [json.loads(line) for line in lines]
    assert [status for status, _ in found] == [0] * len(asked), done.stderr[-2000:]
    return [text for _, text in found]
