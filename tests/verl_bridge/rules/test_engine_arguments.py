# SPDX-License-Identifier: Apache-2.0
"""A misspelled argument of a rollout engine is refused, and none that the engine has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.verl_bridge.rollout.sglang.arguments import CPU_ARGUMENTS
from recipe.async_pipeline.verl_bridge.rules import engine_arguments
from recipe.async_pipeline.verl_bridge.rules.engine_arguments import (
    ENGINES,
    ROLLOUT,
    check_arguments,
    check_engine_names,
    check_listed,
    declared_arguments,
    largest_adapter_rank,
    listed,
)
from tests.conftest import Load
from tests.verl_bridge.conftest import Smoke, refused

SOURCE = """
class Other:
    elsewhere: int = 0

class ServerArgs:
    attention_backend: str | None = None
    max_total_tokens: int = 0
    CONSTANT = 3

    def method(self) -> None:
        local: int = 0

class EngineArgs:
    max_num_seqs: int | None = None
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    old_switch: Optional[bool] = None

    def add_cli_args(parser):
        parser.add_argument("--block-size", "-b", type=int)
        parser.add_argument("--enforce-eager", **kwargs)
        parser.add_argument(f"--{name}")
"""


SWITCHES = {"enforce_eager", "async_scheduling", "old_switch"}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Both engines, with `SOURCE` as their source, in a folder."""
    for file in (file for files in engine_arguments.SOURCES.values() for file in files):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(SOURCE, encoding="utf-8")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(engine_arguments, "find_spec", lambda _: spec)
    engine_arguments.arguments_of.cache_clear()
    yield tmp_path
    engine_arguments.arguments_of.cache_clear()


def test_names_are_fields_and_options() -> None:
    fields = {"attention_backend", "max_total_tokens", "max_num_seqs"}
    assert {name for name, _ in declared_arguments(SOURCE, options=False)} == fields | SWITCHES
    assert {*declared_arguments(SOURCE, options=True)} == {
        *((name, False) for name in (*fields, "block_size", "enforce_eager")),
        *((name, True) for name in SWITCHES),
    }


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        ("sglang", {"attention_backend": "fa3", "max_total_tokens": None}),
        ("vllm", {"max_num_seqs": 3, "block-size": 16, "no-block-size": True}),
        ("vllm", {"enforce-eager": True, "async_scheduling": None, "old_switch": False}),
        ("trtllm", {"anything": 1}),
    ],
)
@pytest.mark.usefixtures("installed")
def test_arguments_that_the_engine_has_are_accepted(engine: str, arguments: dict[str, Any]) -> None:
    check_arguments(engine, arguments)


@pytest.mark.parametrize(
    ("engine", "arguments", "message"),
    [
        (
            "sglang",
            {"attention_backend": "fa3", "atention_backend": "fa3"},
            f"{ROLLOUT}.engine_kwargs.sglang.atention_backend must be an argument of the installed sglang, "
            "got 'fa3' (did you mean 'attention_backend'?); correct the name, or leave it out",
        ),
        # SGLang gets keyword arguments, which have no dashes.
        ("sglang", {"max-total-tokens": 8}, "got 8 (did you mean 'max_total_tokens'?); correct"),
        (
            "vllm",
            {"max_num_sequs": 8},
            "argument of the installed vllm, got 8 (did you mean 'max_num_seqs'?)",
        ),
        (
            "vllm",
            {"zzz": None},
            "engine_kwargs.vllm.zzz must be an argument of the installed vllm, got None; ",
        ),
        (
            "vllm",
            {"enforce-eager": "maybe"},
            f"{ROLLOUT}.engine_kwargs.vllm.enforce-eager must be True or False, got 'maybe'; correct it, or",
        ),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_name_or_a_switch_that_the_engine_does_not_take_is_refused(
    engine: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_arguments(engine, arguments)


def test_without_readable_source_nothing_is_refused(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (installed / "srt" / "server_args.py").write_text("class ServerArgs(", encoding="utf-8")
    check_arguments("sglang", {"zzz": 1})
    monkeypatch.setattr(engine_arguments, "find_spec", lambda _: None)
    check_arguments("vllm", {"zzz": 1})


def test_a_section_of_no_engine_is_refused() -> None:
    check_engine_names(dict.fromkeys(ENGINES, {}), "vllm")
    with pytest.raises(ConfigError, match=r"engine_kwargs.sglng must be .*\(did you mean 'sglang'\?\); corr"):
        check_engine_names({"sglng": {"attention_backend": "fa3"}}, "vllm")


@pytest.mark.parametrize(("chosen", "other"), [("vllm", "sglang"), ("sglang", "vllm"), ("diffusers", "vllm")])
def test_arguments_of_another_engine_are_not_ignored(chosen: str, other: str) -> None:
    check_engine_names({other: {"seed": None}, chosen: {"seed": 1}} if chosen in ENGINES else {}, chosen)
    with pytest.raises(
        ConfigError,
        match=rf"engine_kwargs\.{other}\.seed requires \S+\.name={other}, got \S+\.name={chosen}, which",
    ):
        check_engine_names({other: {"skip": None, "seed": 1}}, chosen)


@pytest.mark.real_engine
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_run_is_refused_in_one_line(
    launch: ModuleType, smoke: Smoke, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    changes = {f"{ROLLOUT}.name": engine, f"{ROLLOUT}.engine_kwargs.{engine}.max_model_lenn": 8}
    assert f"engine_kwargs.{engine}.max_model_lenn must be an argument" in refused(
        launch, smoke(changes), capsys
    )
    changes = {f"{ROLLOUT}.name": engine, f"{ROLLOUT}.engine_kwargs.{engine}n.seed": 8}
    assert f"did you mean '{engine}'?" in refused(launch, smoke(changes), capsys)


@pytest.mark.real_engine
def test_every_option_of_vllm_is_accepted(load: Load) -> None:
    load("recipe.async_pipeline.verl_bridge.rollout.vllm.server")
    parser = load("vllm.utils.argparse_utils").FlexibleArgumentParser()
    load("vllm.entrypoints.openai.cli_args").make_arg_parser(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    names = {option[2:] for option in options if option.startswith("--") and option != "--help"}
    assert len(names) > 200
    check_arguments("vllm", dict.fromkeys(names))


@pytest.mark.real_engine
def test_the_names_that_the_pipeline_knows_are_arguments(load: Load) -> None:
    sglang = load("recipe.async_pipeline.verl_bridge.rules.sglang_rules").REPLACED
    check_arguments("sglang", dict.fromkeys([*sglang, *CPU_ARGUMENTS, "max_loras_per_batch"]))
    vllm = load("recipe.async_pipeline.verl_bridge.rules.model_rules").REPLACED_ARGUMENTS
    check_arguments("vllm", dict.fromkeys(vllm))


@pytest.mark.parametrize(
    ("source", "largest"),
    [("MaxLoRARanks = Literal[1, 8, 512]\n", 512), ("MaxLoRARanks = Any\n", None), (None, None)],
)
def test_the_largest_rank_is_read_from_vllms_source(
    installed: Path, source: str | None, largest: int | None
) -> None:
    if source is not None:
        (installed / "config").mkdir()
        (installed / "config" / "lora.py").write_text(source, encoding="utf-8")
    assert largest_adapter_rank() == largest


@pytest.mark.real_engine
def test_a_rank_that_vllm_does_not_serve_is_refused(
    load: Load, smoke: Smoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = load("recipe.async_pipeline.verl_bridge.rules.config_checks")
    adapters = {"actor_rollout_ref.model.lora_rank": 1024, f"{ROLLOUT}.load_format": "auto"}
    with pytest.raises(ConfigError, match="lora_rank must be at most 512, .* got 1024; lower it"):
        checks.checked(smoke(adapters))
    monkeypatch.setattr(checks, "largest_adapter_rank", lambda: None)
    unread = checks.checked(smoke(adapters), absent=[])
    assert unread.unchecked == ("the largest rank of an adapter, for which verl asks vllm",)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("load_format", "LoadFormats"),
        ("logprobs_mode", "LogprobsMode"),
        ("scheduling_policy", "SchedulerPolicy"),
    ],
)
def test_some_values_are_the_installed_engines(installed: Path, key: str, name: str) -> None:
    check_listed("vllm", {key: "unread"})
    file, *_ = engine_arguments.LISTS["vllm"][key]
    (installed / file).parent.mkdir(parents=True, exist_ok=True)
    (installed / file).write_text(f'{name} = Literal[\n    "auto",\n    "dummy",\n]\n', encoding="utf-8")
    for value in ("auto", "dummy", None):
        check_listed("vllm", {key: value})
    with pytest.raises(ConfigError, match=rf"{key} must be one of auto, dummy .* 'dumy' \(did you mean"):
        check_listed("vllm", {key: "dumy"})


@pytest.mark.real_engine
def test_the_forms_of_weights_are_read_from_the_engines(load: Load) -> None:
    known = load("typing").get_args(load("vllm.model_executor.model_loader").LoadFormats)
    assert listed("vllm", "load_format") == known
    assert listed("vllm", "logprobs_mode") == load("typing").get_args(load("vllm.config.model").LogprobsMode)
    policies = load("typing").get_args(load("vllm.config.scheduler").SchedulerPolicy)
    assert listed("vllm", "scheduling_policy") == policies
    ours = load("sglang.srt.server_args")
    assert listed("sglang", "load_format") == tuple(ours.LOAD_FORMAT_CHOICES)
    assert set(listed("sglang", "attention_backend")) == {*ours.ATTENTION_BACKEND_CHOICES}
    assert set(listed("sglang", "moe_runner_backend")) == {*ours.MOE_RUNNER_BACKEND_CHOICES}
    members = load("vllm.v1.attention.backends.registry").AttentionBackendEnum
    assert listed("vllm", "attention_backend") == tuple(members.__members__)


@pytest.mark.real_engine
@pytest.mark.parametrize(
    ("engine", "wrong", "right"), [("vllm", "FLASH", "flash_attn"), ("sglang", "fa", "fa3")]
)
def test_an_attention_that_the_engine_does_not_have_is_refused(
    load: Load, engine: str, wrong: str, right: str
) -> None:
    load(engine)
    with pytest.raises(
        ConfigError, match=rf"{engine}.attention_backend must be one of .*{right.upper()}|{right}"
    ):
        check_arguments(engine, {"attention_backend": wrong})
    check_arguments(engine, {"attention_backend": right})
