# SPDX-License-Identifier: Apache-2.0
"""The hooks of verl's entry point: with the switch, without it, and with a broken installation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.async_pipeline.config.paths import OWN, RUNTIME
from recipe.async_pipeline.errors import AsyncPipelineError, ConfigError, PatchedVerlRequired
from recipe.async_pipeline.observe.table import MARK
from recipe.async_pipeline.verl_bridge import hooks, launch, process, trainer
from tests import REPOSITORY


def config(**values: Any) -> DictConfig:
    """A config with values at dotted paths, which are written with two underscores."""
    made = OmegaConf.create({"actor_rollout_ref": {}, "trainer": {"v1": {"trainer_mode": "colocate_sync"}}})
    for path, value in values.items():
        OmegaConf.update(made, path.replace("__", "."), value, force_add=True)
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of the modules behind the door, which are replaced."""
    made: list[tuple[Any, ...]] = []

    def replace(package: ModuleType, name: str, *functions: str) -> None:
        module = ModuleType(f"{package.__name__}.{name}")
        for function in functions:
            setattr(module, function, lambda *args, called=f"{name}.{function}": made.append((called, *args)))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(package, name, module, raising=False)

    replace(launch, "prepare", "prepare", "adopt", "check_cluster", "start_sample_store")
    replace(process, "interrupts", "wait_for")
    replace(trainer, "registration", "begin")
    return made


def test_a_command_line_of_older_verl_is_rewritten_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["main_ppo.py", "--config-name", "ppo_trainer", "reward_model.reward_manager=dapo", "data.seed=1"]
    hooks.rewrite_command_line(argv)
    assert argv[3] == "reward_model.reward_manager=dapo" and capsys.readouterr().out == "", "no switch"
    argv.append("+async_pipeline=True")
    hooks.rewrite_command_line(argv)
    rewritten = ["reward.reward_manager.name=dapo", "data.seed=1", "+async_pipeline=True"]
    assert argv == ["main_ppo.py", "--config-name", "ppo_trainer", *rewritten]
    note = "reward_model.reward_manager=dapo -> reward.reward_manager.name=dapo"
    assert capsys.readouterr().out == f"{MARK} {note}\n"


@pytest.mark.parametrize(
    ("program", "rewritten"),
    [
        (["-m", "verl.experimental.fully_async_policy.fully_async_main"], True),
        (["recipe/dapo/main_dapo.py"], True),
        (["-m", "verl.trainer.main_ppo"], False),
        (["-m", "recipe.async_pipeline", "watch", "--", "python", "-m", "recipe.dapo.main_dapo"], False),
    ],
)
def test_other_entry_points_have_their_command_lines_rewritten(
    monkeypatch: pytest.MonkeyPatch, program: list[str], rewritten: bool
) -> None:
    words = ["reward_model.num_workers=2", "rollout.nnodes=1", "+async_pipeline=True"]
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", *program, *words])
    # As Python has it while it imports the packages of a module, or runs a file.
    monkeypatch.setattr(sys, "argv", [program[0], *program[2:], *words])
    hooks.rewrite_on_import()
    assert sys.argv[-3:] == ["reward.num_workers=2" if rewritten else words[0], *words[1:]]


def test_a_program_that_would_ignore_the_switch_refuses_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "verl.trainer.sft_trainer"
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", program, "data.x=1", "+async_pipeline=True"])
    monkeypatch.setattr(sys, "argv", ["-m", "data.x=1", "+async_pipeline=True"])
    with pytest.raises(SystemExit) as raised:
        hooks.rewrite_on_import()
    assert raised.value.code == 2
    assert f"not known to {program}, which would ignore it" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["-m", "data.x=async_pipeline", "trainer.y=1"])
    hooks.rewrite_on_import()


def test_a_spawned_process_keeps_the_command_line_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["recipe/dapo/main_dapo.py", "reward_model.num_workers=2", *"abcd", "+async_pipeline=True"]
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "spawn_main()", "--multiprocessing-fork"])
    monkeypatch.setattr(sys, "argv", words.copy())
    hooks.rewrite_on_import()
    assert sys.argv == words


def test_a_key_that_no_code_reads_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    unread, plain = "+actor_rollout_ref.rollout.activate_rudder=1", ["data.seed=1", "+async_pipeline=True"]
    argv = ["main_ppo.py", unread, *plain]
    hooks.rewrite_command_line(argv)
    assert argv[1:] == plain
    assert "ignored: actor_rollout_ref.rollout.activate_rudder, because" in capsys.readouterr().out
    argv = ["main_ppo.py", "--config-name", "ppo_trainer", unread, *plain]
    hooks.rewrite_command_line(argv)
    assert unread in argv, "another configuration may use it"


def test_names_of_a_command_line_need_not_be_ascii() -> None:
    argv = ["main_ppo.py", "trainer.experiment_name=läuft", "+async_pipeline=True"]
    hooks.rewrite_command_line(argv)
    assert argv == ["main_ppo.py", "trainer.experiment_name='läuft'", "+async_pipeline=True"]


@pytest.mark.parametrize("switch", ["async_pipeline", "actor_rollout_ref__async_pipeline"])
def test_with_either_switch_the_config_is_prepared(calls: list[tuple[Any, ...]], switch: str) -> None:
    asked = config(**{switch: True})
    hooks.prepare(asked)
    assert calls == [("prepare.prepare", asked, ())]


@pytest.mark.parametrize("values", [{}, {"async_pipeline": False}, {"async_pipeline": None}])
def test_without_the_switch_nothing_happens(calls: list[tuple[Any, ...]], values: dict[str, Any]) -> None:
    stock = config(**values)
    before = OmegaConf.to_container(stock)
    hooks.prepare(stock)
    assert calls == []
    assert OmegaConf.to_container(stock) == before


@pytest.mark.parametrize(
    ("values", "part"),
    [
        (
            {f"{OWN}.staleness.max_lag".replace(".", "__"): 1},
            "max_lag is set but the pipeline is not asked for",
        ),
        ({"pg_variant": "topr"}, "add +async_pipeline=True"),
        ({"async_pipeline": 1}, "async_pipeline must be True or False, got 1"),
    ],
)
def test_a_mistake_is_one_line(
    calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str], values: dict[str, Any], part: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        hooks.prepare(config(**values))
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith(f"{MARK} ") and error.count("\n") == 1 and part in error
    assert calls == []


@pytest.mark.parametrize("broken", [ImportError("no msgspec"), AttributeError("half an upgrade")])
def test_a_broken_installation_is_one_line_if_the_switch_is_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: Exception
) -> None:
    class Broken:
        """Stands where `launch.prepare` is looked for."""

        def find_spec(self, name: str, *args: Any) -> None:
            if name.endswith("verl_bridge.launch.prepare"):
                raise broken

    monkeypatch.delitem(sys.modules, f"{launch.__name__}.prepare", raising=False)
    monkeypatch.delattr(launch, "prepare", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    hooks.prepare(config())
    with pytest.raises(SystemExit) as ended:
        hooks.prepare(config(async_pipeline=True))
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.count("\n") == 1 and str(broken) in error and "cannot be imported" in error


def test_a_pipeline_run_is_begun_and_awaited(calls: list[tuple[Any, ...]]) -> None:
    keys = {f"{OWN}.faults.notice_s": 30.0, f"{RUNTIME}.run_dir": "/a/run"}
    values = {path.replace(".", "__"): value for path, value in keys.items()}
    ours = config(trainer__v1__trainer_mode="one_step_off", **values)
    hooks.wait_for("running", ours)
    hooks.begin(ours)
    assert calls == [
        ("prepare.check_cluster", ours),
        ("prepare.start_sample_store", ours),
        ("interrupts.wait_for", "running", Path("/a/run"), 30.0),
        ("registration.begin", ours),
    ]


def test_the_cause_is_one_line_if_the_sample_store_cannot_start(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(config: DictConfig) -> None:
        raise MemoryError("no room for the rows")

    monkeypatch.setattr(sys.modules[f"{launch.__name__}.prepare"], "start_sample_store", start)
    with pytest.raises(MemoryError):
        hooks.wait_for("running", config(trainer__v1__trainer_mode="one_step_off"))
    assert capsys.readouterr().out.startswith(f"{MARK} cause: MemoryError: no room for the rows")


def test_the_cause_is_one_line_if_the_trainer_cannot_begin(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin(config: DictConfig) -> None:
        raise ConfigError("run_dir must be shared")

    monkeypatch.setattr(sys.modules[f"{trainer.__name__}.registration"], "begin", begin)
    with pytest.raises(ConfigError):
        hooks.begin(config(trainer__v1__trainer_mode="one_step_off"))
    assert capsys.readouterr().out == f"{MARK} cause: run_dir must be shared\n"


def test_a_run_of_an_unpatched_verl_is_adopted(calls: list[tuple[Any, ...]]) -> None:
    ours = config(trainer__v1__trainer_mode="async_pipeline")
    hooks.adopt(ours)
    assert calls == [("prepare.adopt", ours), ("registration.begin", ours)]


@pytest.mark.parametrize("error", [ConfigError("a wrong key"), PatchedVerlRequired("verl/a.py is diverged")])
def test_the_cause_is_one_line_if_a_run_cannot_be_adopted(
    calls: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: AsyncPipelineError,
) -> None:
    def adopt(config: DictConfig) -> None:
        raise error

    monkeypatch.setattr(sys.modules[f"{launch.__name__}.prepare"], "adopt", adopt)
    with pytest.raises(type(error)):
        hooks.adopt(config(trainer__v1__trainer_mode="async_pipeline"))
    assert capsys.readouterr().out == f"{MARK} cause: {error}\n"
    assert calls == []


def test_a_trainer_of_verls_is_left_alone(calls: list[tuple[Any, ...]]) -> None:
    stock = config(**{OWN.replace(".", "__"): {"max_lag": None}})
    hooks.wait_for("running", stock)
    hooks.begin(stock)
    assert calls == []


def test_the_front_door_loads_nothing_heavy() -> None:
    heavy = {"torch", "verl", "ray", "vllm", "transformers", f"{launch.__name__}.prepare"}
    code = f"import sys, {hooks.__name__}; print(*sorted({heavy!r} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
