# SPDX-License-Identifier: Apache-2.0
"""A command line with unknown keys gets a line for each of them; hydra stops at the first."""

from __future__ import annotations

from types import ModuleType

import pytest

from recipe.async_pipeline.config.keys.entry_points import FULLY_ASYNC
from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.verl_bridge import hooks
from tests import REPOSITORY

pytestmark = pytest.mark.real_engine

SMOKE = ["--config-path", str(REPOSITORY / "configs"), "--config-name=smoke_cpu"]
GDPO = ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a]"]
UNKNOWN = [
    "actor_rollout_ref.actor.ppo_mini_batch_sise=8",
    "trainer.nodes=2",
    "data.unheard=5",
    "+async_pipeline=True",
]


def test_all_unknown_keys_are_named_with_what_else_is_wrong(module: ModuleType) -> None:
    with pytest.raises(ConfigError) as raised:
        module.check_command_line(["actor_rollout_ref.rollout.name=vllm", *UNKNOWN, *GDPO])
    first, second, third, *others = raised.value.problems
    assert not any("gdpo_reward_keys" in other for other in others[1:]), "one line for a key"
    assert first.endswith("is not a key of this config; did you mean 'ppo_mini_batch_size'?")
    assert second == "trainer.nodes is not a key of this config; did you mean 'nnodes'?"
    assert third.startswith(
        "data.unheard is not a key of this config, and no code of verl reads it; leave it out"
    )
    assert any("actor_rollout_ref.rollout.nnodes must be >= 1" in other for other in others)


def test_the_entry_point_ends_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    contradiction = ["reward_model.reward_manager=dapo", "reward.reward_manager.name=naive"]
    with pytest.raises(SystemExit) as ended:
        hooks.rewrite_command_line(["main_ppo.py", *SMOKE, *UNKNOWN, *contradiction])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "  2. trainer.nodes is not a key" in error and "  3. data.unheard is not a key" in error
    assert "  4. reward_model.reward_manager is an old name of reward.reward_manager.name" in error


def test_a_missing_plus_does_not_hide_a_wrong_value(module: ModuleType) -> None:
    lag = f"{OWN}.staleness.max_lag"
    given = ["actor_rollout_ref.rollout.name=vllm", "async_pipeline=True", "async_strategy=two", f"{lag}=-1"]
    with pytest.raises(ConfigError) as raised:
        module.check_command_line(given)
    found = raised.value.problems
    for path in ("async_pipeline", "async_strategy", lag):
        assert (
            f"+{path} must be written with its +, since this config has no such key; write +{path}=..."
            in found
        )
    assert any(problem.startswith("async_strategy must be one of") for problem in found)
    assert any(problem.startswith(f"{lag} must be") for problem in found)


def test_a_contradiction_is_named_although_hydra_refuses_the_rest(module: ModuleType) -> None:
    for arguments in (["--multirun", "data.seed=1,2"], ["--config-name=nowhere"]):
        with pytest.raises(ConfigError, match="^an old key$"):
            module.check_command_line(arguments, ("an old key",))


@pytest.mark.parametrize(
    "arguments",
    [
        SMOKE,
        [*SMOKE, "data.train_batch_size=8", "+data.unheard=5"],
        # hydra's own errors, and ways to start it that are not composed here.
        ["--multirun", "data.train_batch_size=8,16", *UNKNOWN],
        ["--config-name=nowhere", *UNKNOWN],
        ["--config-path=nowhere", *UNKNOWN],
    ],
)
def test_all_else_is_left_to_hydra(module: ModuleType, arguments: list[str]) -> None:
    module.check_command_line(arguments)


def test_a_word_that_cannot_be_read_hides_no_other(module: ModuleType) -> None:
    broken = ["trainer.logger=[console,wandb", "trainer.nnodes=1,2", "data.unheard=5"]
    with pytest.raises(ConfigError) as raised:
        module.check_command_line(["+async_pipeline=True", *broken, "algorithm.adv_estimator=gpro"])
    first, second, third, *others = raised.value.problems
    assert first.startswith("trainer.logger=[console,wandb cannot be parsed")
    assert second == "trainer.nnodes must be one value, got 1,2; write 'trainer.nnodes=[1,2]' for a list"
    assert third.startswith("data.unheard is not a key")
    assert any("adv_estimator must be one of" in other for other in others)


def test_all_problems_of_another_entry_point_are_named(module: ModuleType) -> None:
    given = [
        "+async_pipeline=True",
        "data.zzz=3",
        "trainer.yyy=3",
        "rollout.nnodes=1",
        "rollout.n_gpus_per_node=4",
    ]
    with pytest.raises(ConfigError) as raised:
        module.check_command_line([*given, "async_training.staleness_threshold=-1"], (), FULLY_ASYNC)
    first, second, *others = raised.value.problems
    assert first.startswith("data.zzz is not a key") and second.startswith("trainer.yyy is not a key")
    assert any("staleness_threshold" in other for other in others)
    module.check_command_line([*given[:1], "rollout.nnodes=1", "rollout.n_gpus_per_node=4"], (), FULLY_ASYNC)


def test_a_key_of_another_engine_names_that(module: ModuleType) -> None:
    key = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
    replay = "actor_rollout_ref.actor.megatron.router_replay.mode"
    with pytest.raises(ConfigError) as raised:
        module.check_command_line(["+async_pipeline=True", f"{key}=2", f"{replay}=R3"])
    of_size, of_replay = raised.value.problems[:2]
    assert of_size == f"{key} is a key of model_engine=megatron; set that, or leave the key out"
    assert of_replay.endswith(f"; set that, with {replay}=R2, or leave the key out")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("rollout.n=3", "did you mean 'actor_rollout_ref.rollout.n'?"),
        ("actor.strategy=fsdp2", "did you mean 'actor_rollout_ref.actor.strategy'?"),
        ("trainer.nnode=2", "leave it out: 'nnodes' is set, too"),
    ],
)
def test_what_an_unknown_key_is_meant_for_is_named(module: ModuleType, word: str, meant: str) -> None:
    with pytest.raises(ConfigError) as raised:
        module.check_command_line(["+async_pipeline=True", word, "trainer.nnodes=1"])
    assert raised.value.problems[0] == f"{word.partition('=')[0]} is not a key of this config; {meant}"


def test_an_override_that_cannot_be_parsed_is_one_line(module: ModuleType) -> None:
    """hydra itself prints a traceback if HYDRA_FULL_ERROR is set."""
    for override in ("trainer.logger=[a,b", "data.train_batch_size=["):
        with pytest.raises(ConfigError) as raised:
            module.check_command_line([*SMOKE, override])
        (problem,) = raised.value.problems
        assert " cannot be parsed" in problem and "\n" not in problem
