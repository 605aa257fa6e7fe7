# SPDX-License-Identifier: Apache-2.0
"""Command lines of other versions of verl are rewritten with a note; what is left out has a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from recipe.async_pipeline.config.checks.refusals import Settings, refuse
from recipe.async_pipeline.config.checks.verl_options import RULES
from recipe.async_pipeline.config.keys.older_verl import MOVED, asks_for_pipeline, corrected, modernised
from recipe.async_pipeline.config.paths import nested
from recipe.async_pipeline.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
CASES = yaml.safe_load((Path(__file__).parent / "older_verl.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("word", "becomes"), CASES["words"])
def test_a_word_is_rewritten_with_a_note(word: str, becomes: list[str]) -> None:
    found, notes, _ = modernised([word])
    assert found == becomes
    assert len(notes) == 1 and word.partition("=")[0].lstrip("+") in notes[0]


@pytest.mark.parametrize("path", [path for path, moved in MOVED.items() if not moved.now])
def test_a_key_that_is_left_out_is_named_with_the_reason(path: str) -> None:
    found, (note,), _ = modernised([f"{path}=True"])
    assert found == [] and note == f"ignored: {path}=True, because {MOVED[path].why}" and MOVED[path].why


def test_every_note_says_something() -> None:
    assert all(moved.now or moved.why for moved in MOVED.values())


@pytest.mark.parametrize(
    "word",
    [
        "data.train_batch_size=8",
        f"{ROLLOUT}.mode=async",
        f"{ROLLOUT}.load_format=auto",
        "data.return_raw_chat=True",
        f"{ROLLOUT}.engine_kwargs.vllm={{a:1}}",
        "trainer.v1.sampler.max_off_policy_threshold=null",
        f"{ACTOR}.strategy=fsdp2",
        "~data.seed",
    ],
)
def test_other_words_remain(word: str) -> None:
    assert modernised([word]) == ([word], (), ())


def test_a_key_that_a_rule_refuses_reaches_it() -> None:
    word = "data.sampler.class_path=a.py"
    assert modernised([word]) == ([f"++{word}"], (), ())


def test_a_key_that_this_verl_has_needs_no_plus() -> None:
    words = ["+data.seed=1", "++data.seed=1", "+data.other=1"]
    found, notes, _ = modernised(words, lambda path: path == "data.seed")
    assert found == ["data.seed=1", "++data.seed=1", "+data.other=1"]
    assert notes == ("+data.seed -> data.seed, which this verl has",)


@pytest.mark.parametrize("value", ["dapo", "'dapo'", "DAPO"])
def test_an_old_key_with_the_value_of_the_present_one_is_left_out(value: str) -> None:
    found, (note,), _ = modernised(
        ["reward_model.reward_manager=dapo", f"reward.reward_manager.name={value}"]
    )
    assert found == [f"reward.reward_manager.name={value}"]
    assert note.startswith("ignored: reward_model.reward_manager=dapo, because reward.reward_manager.name is")


def test_an_old_key_that_contradicts_the_present_one_is_refused() -> None:
    words = ["custom_reward_function.path=a.py", "reward.custom_reward_function.path=b.py"]
    more = ["reward_model.reward_manager=dapo", "reward.reward_manager.name=naive"]
    found, notes, (first, second) = modernised([*words, *more])
    assert found == [words[1], more[1]] and not notes
    assert first.startswith(
        "custom_reward_function.path is an old name of reward.custom_reward_function.path"
    )
    assert first.endswith("got a.py and b.py; keep one of them") and "got dapo and naive" in second


def test_old_keys_of_one_present_key_that_disagree_are_refused() -> None:
    words = ["reward_model.reward_manager=naive", "reward_model.reward_loop_class_name=Mine"]
    found, _, (problem,) = modernised(words)
    assert found == ["reward.reward_manager.name=naive"]
    assert problem == (
        "reward_model.reward_loop_class_name and reward_model.reward_manager are old names of "
        "reward.reward_manager.name, got Mine and naive; keep one of them"
    )
    assert not modernised([words[0], words[0].replace("naive", "dapo")]).problems, "hydra takes the last"


def test_the_engine_of_a_section_gives_way_to_the_strategy() -> None:
    words = [f"{ACTOR}.fsdp_config.strategy=fsdp", f"{ACTOR}.strategy=fsdp2"]
    assert modernised(words)[0] == words


@pytest.mark.parametrize(
    ("level", "applied", "becomes"),
    [("sequence", "True", "sequence"), ("sequence", "False", "null"), ("token", "true", "token")],
)
def test_weights_of_an_older_verl_keep_their_level(level: str, applied: str, becomes: str) -> None:
    words = [f"+algorithm.rollout_is={applied}", f"+algorithm.rollout_is_level={level}"]
    found, notes, _ = modernised([*words, "+algorithm.rollout_is_mode=truncate"])
    assert found == [f"{CORRECTION}.rollout_is={becomes}"]
    assert f"rollout_is_level={level}, because {CORRECTION}.rollout_is has the level" in notes[1]


@pytest.mark.parametrize("word", ["level=geometric", "mode=mask", "veto_threshold=1e-4"])
def test_a_correction_that_verl_no_longer_has_is_refused(word: str) -> None:
    (found,), notes, _ = modernised([f"+algorithm.rollout_is_{word}"])
    assert found == f"++algorithm.rollout_is_{word}" and not notes
    path, _, value = found.removeprefix("++").partition("=")
    with pytest.raises(ConfigError, match=f"^{path} must be None, got '{value}'; leave it out; today"):
        refuse([row for row in RULES if row.path == path], Settings(nested({path: value})))


def test_a_chosen_strategy_stays_with_a_trainer_of_verl() -> None:
    words = ["trainer.v1.trainer_mode=colocate_async", "+async_strategy=one_step_off"]
    found, (note,), _ = modernised(words)
    assert found == ["+async_strategy=one_step_off"] and "the chosen strategy" in note


@pytest.mark.parametrize(("raw", "expected"), CASES["settings"])
def test_what_a_run_needs_is_set_with_the_reason(raw: dict[str, Any], expected: dict[str, Any]) -> None:
    found = corrected(nested(raw))
    assert {path: value for path, (value, _) in found.items()} == expected
    assert all(why for _, why in found.values())


def test_an_engine_that_is_not_named_is_vllm() -> None:
    """verl's default until its configuration left the name to the user."""
    assert corrected(nested({f"{ROLLOUT}.name": "???"}))[f"{ROLLOUT}.name"][0] == "vllm"


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        (["+async_pipeline=True"], True),
        (["trainer.v1.trainer_mode=async_pipeline"], True),
        (["+actor_rollout_ref.async_pipeline=true"], True),
        (["+async_pipeline=False"], False),
        (["data.seed=1"], False),
    ],
)
def test_only_a_command_line_with_the_switch_is_rewritten(words: list[str], asks: bool) -> None:
    assert asks_for_pipeline(words) is asks
