# SPDX-License-Identifier: Apache-2.0
"""Runs of other entry points are taken over with the switch, and left alone without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.observe.table import MARK
from recipe.async_pipeline.verl_bridge import hooks
from recipe.async_pipeline.verl_bridge.launch import entry_points

STOCK, OWN = object(), object()


def runner(name: str) -> Any:
    """A class of actors as Ray has it."""
    return SimpleNamespace(__ray_metadata__=SimpleNamespace(class_name=name))


def config(**values: Any) -> DictConfig:
    made = OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8}, "rollout": {"nnodes": 0}},
            "async_training": {"require_batches": 1, "staleness_threshold": 0.1},
            "rollout": {"nnodes": 1, "total_rollout_steps": 80},
            "trainer": {"total_training_steps": None},
            **values,
        }
    )
    OmegaConf.set_struct(made, True)
    return made


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`run_ppo` as other entry points get it; it returns the runner. `prepared` has the configs, `problems`
    has the ones that are known before.
    """
    prepared: list[Any] = []
    problems: list[str] = []

    def prepare(config: DictConfig, known: tuple[str, ...]) -> None:
        prepared.append(config)
        problems.extend(known)

    monkeypatch.setattr(hooks, "prepare", prepare)
    monkeypatch.setattr(entry_points, "_main_ppos_runner", lambda config: OWN)
    wrapped: Any = entry_points.of_any_entry_point(lambda config, task_runner_class: task_runner_class)
    wrapped.prepared, wrapped.problems = prepared, problems
    return wrapped


def test_a_known_entry_point_runs_main_ppos_runner(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    given = config(async_pipeline=True)
    assert run(given, task_runner_class=runner("FullyAsyncTaskRunner")) is OWN
    assert run.prepared == [given]
    assert given.actor_rollout_ref.rollout.nnodes == 1 and given.trainer.total_training_steps == 10
    assert given.async_strategy == "fully_async" and "rollout" not in given
    assert given.async_training == {"require_batches": 1, "staleness_threshold": 0.1}
    assert f"{MARK} rollout.nnodes=1 -> actor_rollout_ref.rollout.nnodes=1" in capsys.readouterr().out


def test_main_ppos_own_runner_is_prepared_only(run: Any) -> None:
    given = config(async_pipeline=True)
    assert run(given, runner("TaskRunnerV1")) is OWN
    assert run.prepared == [given] and "rollout" in given


@pytest.mark.parametrize("values", [{}, {"async_pipeline": False}])
def test_without_the_switch_nothing_happens(run: Any, values: dict[str, Any]) -> None:
    given = config(**values)
    before = OmegaConf.to_container(given)
    assert run(given, STOCK) is STOCK
    assert run.prepared == [] and OmegaConf.to_container(given) == before


def test_an_unknown_entry_point_is_refused_in_one_line(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(config(async_pipeline=True), runner("CustomTaskRunner"))
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and run.prepared == []
    assert (
        "entry point of CustomTaskRunner, which would ignore it; start verl.trainer.main_ppo or one of"
        in error
    )


def test_a_config_that_still_has_the_switch_is_not_validated(capsys: pytest.CaptureFixture[str]) -> None:
    validate = entry_points.without_switch(lambda config, use_critic: "validated")
    assert validate(config(), use_critic=False) == "validated"
    assert validate(config(async_pipeline=False), use_critic=False) == "validated"
    by_name = {"v1": {"trainer_mode": "async_pipeline"}}
    assert validate(config(async_pipeline=True, trainer=by_name), use_critic=False) == "validated"
    for given in (
        config(async_pipeline=True),
        config(actor_rollout_ref={"async_pipeline": True}),
    ):
        with pytest.raises(ConfigError, match="not known to this entry point"):
            validate(config=given, use_critic=False)
        assert f"{MARK} cause: async_pipeline=True is not known" in capsys.readouterr().out


def test_wrong_values_are_refused_with_the_rest(run: Any) -> None:
    given = config(async_pipeline=True, rollout={"nnodes": 0, "fancy": 1}, async_training=None)
    run(given, runner("OneStepTaskRunner"))
    assert run.problems == [
        "rollout.nnodes must be a number >= 1, got 0; correct it",
        "rollout.fancy is not supported; leave it out",
    ]
    assert "rollout" not in given
