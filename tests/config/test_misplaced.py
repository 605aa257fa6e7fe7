# SPDX-License-Identifier: Apache-2.0
"""A misplaced or misspelled key is an error that names the right one."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.aliases import FOREIGN
from recipe.async_pipeline.config.fields import sections_of
from recipe.async_pipeline.config.misplaced import ALSO_VERLS, ON_THE_WAY, unknown_key
from recipe.async_pipeline.config.paths import OWN, RUNTIME
from recipe.async_pipeline.config.schema import AsyncPipelineConfig, knob_paths
from recipe.async_pipeline.config.translation import resolve
from recipe.async_pipeline.errors import ConfigError
from tests.fakes.alias_values import ROLLOUT, assert_one_line, nested, own


def test_a_key_that_the_config_lacks() -> None:
    assert unknown_key("trainer.v1.async_pipeline.staleness.max_lag").endswith(
        "write +trainer.v1.async_pipeline.staleness.max_lag=... to add it"
    )
    assert "nearest knobs: faults.wait_timeout_s, " in unknown_key("trainer.v1.async_pipeline.wait_timeout")
    assert unknown_key("trainer.v1.async_pipeline.agentic.environment_kwargs").endswith(
        "write +trainer.v1.async_pipeline.agentic.environment_kwargs={...} to add them, and "
        "trainer.v1.async_pipeline.agentic.environment_kwargs=null before it to remove the names of the "
        "configuration"
    )
    assert unknown_key("trainer.nope") == (
        "trainer.nope is not a key of this config; check its spelling, or write +trainer.nope=... to add it"
    )
    assert unknown_key("trainer.nope", read=False) == (
        "trainer.nope is not a key of this config, and no code of verl reads it; leave it out, or write "
        "+trainer.nope=... for code of yours that does"
    )
    assert unknown_key("max_turns", read=False).endswith(f"leave it out, or set {OWN}.agentic.max_turns")


def test_an_unknown_knob_gets_a_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(own({"max_lagg": 7}))
    assert_one_line(caught, f"{OWN}.max_lagg", "7", "nearest knobs: staleness.max_lag, ")
    assert "verify_tensors" not in str(caught.value)
    with pytest.raises(
        ConfigError, match="zzz is unknown, got 7; nearest knobs: .*explain --knobs` lists all"
    ):
        resolve(own({"zzz": 7}))


@pytest.mark.parametrize(
    ("path", "knob"),
    [
        ("stalenes.max_lag", "staleness.max_lag"),
        ("rewards.timeout_s", "reward.timeout_s"),
        ("weights.sync.verify_tensors", "weight_sync.verify_tensors"),
        ("publishing.max_concurrent_loads", "weight_sync.max_concurrent_loads"),
    ],
)
def test_a_section_that_does_not_exist_is_unknown_instead_of_misplaced(path: str, knob: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(own({path: 7}))
    assert_one_line(caught, f"{OWN}.{path} is unknown, got 7", f"; nearest knobs: {knob}, ")


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("staleness.max_lag", f"{OWN}.staleness.max_lag"),
        ("trainer.max_lag", f"{OWN}.staleness.max_lag"),
        ("trainer.async_pipeline", OWN),
        ("trainer.async_strategy", "actor_rollout_ref.async_strategy"),
        ("generate_ahead_steps", "trainer.generate_ahead_steps"),
        ("rollout.with_reward", f"{ROLLOUT}.with_reward"),
        ("mine.rollout.with_reward", f"{ROLLOUT}.with_reward"),
    ],
)
def test_a_misplaced_key_is_sent_to_its_place(path: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(nested((path, 5)))
    assert_one_line(caught, f"{path} is misplaced", "got 5", place)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("async_strateg", "async_strategy"),
        ("async_stategy", "async_strategy"),
        ("async_pipelin", "async_pipeline"),
        ("trainer.v1.async_pipelin", "async_pipeline"),
        ("trainer.v1.async_pipelines", "async_pipeline"),
        ("trainer.generate_ahead_step", "generate_ahead_steps"),
        ("actor_rollout_ref.rollout.enable_dual_bufer", "enable_dual_buffer"),
    ],
)
def test_a_misspelled_key_is_not_ignored(path: str, meant: str) -> None:
    raw: dict[str, Any] = {}
    node = raw
    *parents, leaf = path.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[leaf] = "x"
    with pytest.raises(ConfigError, match=f"{path} is unknown, got 'x'; did you mean '{meant}'"):
        resolve(raw)


@pytest.mark.parametrize(
    ("path", "system"),
    [
        ("train_env_manager.group_size", "roll"),
        ("num_return_sequences_in_group", "roll"),
        ("custom_envs.Lake.env_type", "roll"),
        ("rllm.agent.max_steps", "rllm"),
    ],
)
def test_keys_of_another_systems_file_are_sent_to_its_translation(path: str, system: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(nested((path, 4)))
    name = path.partition(".")[0]
    assert_one_line(caught, f"{name} is a key of", "4", f"`async-pipeline translate {system} FILE`")


@pytest.mark.parametrize(
    "name",
    [
        "strategy",
        "run_dir",
        "gather_bucket_size_mb",
        "straggler",
        "depth",
        "load_staging",
        "validation",
        "pools",
    ],
)
@pytest.mark.parametrize("section", ["", "trainer"])
def test_a_knob_one_level_too_high_is_misplaced(section: str, name: str) -> None:
    raw = {section: {name: 3}} if section else {name: 3}
    with pytest.raises(ConfigError, match="is misplaced, got 3; it belongs at trainer.v1.async_pipeline"):
        resolve(raw)


def test_a_section_that_verl_has_too_gets_both_places() -> None:
    with pytest.raises(ConfigError, match=rf"^rollout is misplaced, .* at {OWN}.rollout or {ROLLOUT}$"):
        resolve({"rollout": {"name": "sglang"}, **nested((f"{ROLLOUT}.name", "vllm"))})


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (
            {"stalenes_threshold": 0.5},
            r"async_training\.stalenes_threshold is unknown, got 0.5; did you mean 'staleness_threshold'\?",
        ),
        (
            {"use_rollout_log_probs": True},
            r"async_training\.use_rollout_log_probs is not supported, got True; .*leave it out",
        ),
        (5, "async_training must be a section with some of .*, got 5; correct it"),
    ],
)
def test_keys_of_verls_async_section_are_translated_or_refused(section: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve({"async_training": section})


def test_a_misspelled_loss_key_is_not_ignored() -> None:
    with pytest.raises(
        ConfigError,
        match=r"actor_rollout_ref\.actor\.pg_varient is unknown, got 'tis'; did you mean 'pg_variant'",
    ):
        resolve(nested(("actor_rollout_ref.actor.pg_varient", "tis")))


@pytest.mark.parametrize("path", [path for path in knob_paths() if path.count(".") < 2])
def test_every_knob_is_recognized_on_the_way_to_its_section(path: str) -> None:
    name = path.rpartition(".")[2]
    misplaced = [f"{parent}.{name}".lstrip(".") for parent in ON_THE_WAY]
    misplaced += [f"somewhere.else.{path}"] if "." in path else []
    for key in {*misplaced} - {key.path for key in FOREIGN}:
        with pytest.raises(ConfigError, match=f"^{key} is misplaced, got 3; it belongs at .*{path}"):
            resolve(nested((key, 3)))


@pytest.mark.parametrize("name", ["max_turns", "timeout_s", "environment"])
def test_a_section_of_the_user_may_have_any_name(name: str) -> None:
    assert resolve(nested((f"{ROLLOUT}.custom.{name}", 3))) == resolve({})


@pytest.mark.parametrize("section", [path for path in sections_of(AsyncPipelineConfig) if "." not in path])
def test_a_section_one_level_too_high_is_misplaced(section: str) -> None:
    for parent in ON_THE_WAY:
        key = f"{parent}.{section}".lstrip(".")
        if key != ALSO_VERLS:
            with pytest.raises(ConfigError, match=f"{key} is misplaced, .*belongs at {OWN}.{section}"):
                resolve(nested((key, {"x": 1})))


def test_users_cannot_set_the_state_of_a_run() -> None:
    with pytest.raises(ConfigError, match=f"{RUNTIME} is written when a run is launched; remove it"):
        resolve(nested((f"{RUNTIME}.run_dir", "x")))
