# SPDX-License-Identifier: Apache-2.0
"""Misspelled keys in verl's sections are refused, and what verl or the user's code may read is not."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.async_pipeline.config.keys.aliases import FOREIGN
from recipe.async_pipeline.config.knobs.schema import knob_paths
from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.errors import ConfigError
from tests.verl_bridge.conftest import Smoke

pytestmark = pytest.mark.real_engine

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("path", "value", "meant"),
    [
        (f"{ROLLOUT}.nmea", "sglang", "name"),
        (f"{ROLLOUT}.multi_turn.enablee", True, "enable"),
        (f"{ACTOR}.ppo_mini_batch_sise", 8, "ppo_mini_batch_size"),
        (f"{ACTOR}.fsdp_config.fdsp_size", 2, "fsdp_size"),
        ("trainer.total_training_stesp", 3, "total_training_steps"),
        ("algorithm.adv_estimatro", "gae", "adv_estimator"),
    ],
)
def test_a_misspelled_key_of_verl_is_refused(
    launch: ModuleType, smoke: Smoke, path: str, value: Any, meant: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{path} is unknown, got \S+; did you mean '{meant}'\?$"):
        launch.checked(smoke({path: value}))


def test_all_keys_that_classes_lack_are_refused_at_once(launch: ModuleType, smoke: Smoke) -> None:
    keys = [f"{ROLLOUT}.max_tokens", f"{ROLLOUT}.val_kwargs.max_tokens"]
    keys += [f"{ACTOR}.temperature", "algorithm.clip_ratio"]
    with pytest.raises(ConfigError) as caught:
        launch.checked(smoke(dict.fromkeys(keys, 3)))
    assert sorted(problem.partition(" ")[0] for problem in caught.value.problems) == sorted(keys)


def test_a_key_without_the_outer_section_is_refused(launch: ModuleType, smoke: Smoke) -> None:
    with pytest.raises(ConfigError) as caught:
        launch.checked(smoke({"actor.optim.lr": 3}))
    meant = "actor_rollout_ref.actor.optim.lr"
    assert caught.value.problems == (f"actor.optim.lr is unknown, got 3; did you mean {meant!r}?",)


@pytest.mark.parametrize("section", ["data", "critic", "algorithm", ACTOR, ROLLOUT, f"{ROLLOUT}.multi_turn"])
def test_a_knob_in_a_section_of_verl_is_refused(module: ModuleType, smoke: Smoke, section: str) -> None:
    names = {path.rpartition(".")[2]: path for path in knob_paths() if path.count(".") < 2}
    config, foreign = smoke({}, switched_on=False), {key.path for key in FOREIGN}
    keys = [key for key in (f"{section}.{name}" for name in names) if OmegaConf.select(config, key) is None]
    # A sample of them, because each takes as long as the start of a run.
    for key in [key for key in keys if key not in foreign][len(section) % 9 :: 9]:
        with pytest.raises(ConfigError, match=f"^{key} is misplaced, got 3; it belongs at .*{OWN}"):
            module.check_spelling(smoke({key: 3}, switched_on=False))


@pytest.mark.parametrize(
    "path",
    [
        # verl's configuration has it.
        f"{ACTOR}.use_prefix_grouper",
        # Code of the user may read it: it resembles nothing.
        "trainer.notify_address",
        # Not a section of a dataclass.
        f"{ROLLOUT}.engine_kwargs.vllm.temperaturee",
        "actor_rollout_ref.model.override_config.hidden_sise",
        "data.trian_note",
        f"{ROLLOUT}.engine_kwargs.vllm.max_turns",
    ],
)
def test_keys_that_other_code_may_read_are_not_refused(module: ModuleType, smoke: Smoke, path: str) -> None:
    module.check_spelling(smoke({path: 1}, switched_on=False))


def test_a_section_whose_class_is_unknown_is_left_alone(module: ModuleType, smoke: Smoke) -> None:
    config = smoke({f"{ROLLOUT}._target_": "nowhere.Class", f"{ROLLOUT}.nmea": 1}, switched_on=False)
    module.check_spelling(config)
    config = smoke({f"{ROLLOUT}._target_": "json.dumps", f"{ROLLOUT}.nmea": 1}, switched_on=False)
    module.check_spelling(config)


def test_a_near_name_that_occurs_in_verl_is_not_a_misspelling(module: ModuleType) -> None:
    assert module.near_key("strategi", frozenset({"strategy"})) == "strategy"
    assert module.near_key("strategy", frozenset({"strategy_"})) is None
    assert module.near_key("warp_factor", frozenset({"strategy"})) is None


ROLL = "actor_rollout_ref.rollout.agent.activate_rudder"


def test_added_keys_that_no_code_reads_are_named(module: ModuleType) -> None:
    words = [f"+{ROLL}=True", "++data.rudder_angle=1", "+rudder.angle=2", "+actor.use_legacy=1"]
    words += [f"+{ROLLOUT}.repetition_penalty=1.2"]  # a field of verl's class
    words += ["+trainer.ppo_mini_batch_size=2", "+data.batch_size=2"]  # read of another section
    words += ["+async_flow.staleness=2"]  # which `translate` knows
    # A function of verl, and what is read elsewhere, but not in a section of older keys.
    words += ["+trainer.megatron_calc_layer_map=1", "+reward_model.kl_coef=1", "+reward_model.model.foo=1"]
    rest, notes = module.without_unread(words)
    assert rest == words[1:], "the class of the section would refuse it"
    why = "because no code of verl reads it"
    assert notes == (
        f"ignored: {ROLL}, {why}",
        f"ignored: data.rudder_angle, {why}, unless yours does",
        f"ignored: rudder.angle, {why}, unless yours does",
        f"ignored: actor.use_legacy, {why}, unless yours does",
        f"ignored: {ROLLOUT}.repetition_penalty, because requests are sampled without one, as log-probs are "
        "computed",
        f"ignored: trainer.ppo_mini_batch_size, {why}, unless yours does",
        f"ignored: data.batch_size, {why}, unless yours does",
        f"ignored: async_flow.staleness, {why}, unless yours does",
        f"ignored: trainer.megatron_calc_layer_map, {why}, unless yours does",
        f"ignored: reward_model.kl_coef, {why}, unless yours does",
        f"ignored: reward_model.model.foo, {why}, unless yours does",
    )


@pytest.mark.parametrize(
    "words",
    [
        ["data.seed=1", f"{ROLLOUT}.rudder=1"],
        # A field of the class, and a key that verl's configuration does not have.
        [f"+{ACTOR}.ppo_infer_max_token_len_per_gpu=1", "+data.gen_batch_size=2"],
        # Passed on as a whole.
        [
            f"+{ROLLOUT}.engine_kwargs.vllm.rudder=1",
            "+ray_kwargs.ray_init.rudder=1",
            f"+{ROLLOUT}.custom.rudder=1",
        ],
        ["+actor_rollout_ref.model.override_config.rudder=1", "+data.apply_chat_template_kwargs.rudder=1"],
        # Of this package, and of other systems.
        ["+async_pipeline=True", f"+{OWN}.staleness.max_lag=2", "+async_generation_ratio=1.5"],
        # Another key refers to it.
        ["+rudder.angle=2", "data.seed='${rudder.angle}'"],
        # `check_spelling` refuses it.
        [f"+{ROLLOUT}.nmea=sglang"],
    ],
)
def test_added_keys_that_code_may_read_are_left_alone(module: ModuleType, words: list[str]) -> None:
    assert module.without_unread(words) == (words, ())
