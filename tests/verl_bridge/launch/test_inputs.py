# SPDX-License-Identifier: Apache-2.0
"""What a run could not read is one line each before Ray starts, and a note for a plan."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from recipe.async_pipeline.cli.main import main
from recipe.async_pipeline.errors import ConfigError
from tests import REPOSITORY
from tests.conftest import Load
from tests.verl_bridge.conftest import Smoke
from tests.verl_bridge.launch.conftest import Problems

pytestmark = pytest.mark.real_engine
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Remove what a user's machine says about accounts of trackers."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def test_everything_that_is_missing_is_named_at_once(
    problems: Problems, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "task")
    wrong = {
        "data.train_files": "~/train.parquet",
        "data.val_files": ["a.parquet", "b.csv"],
        f"{MODEL}.path": "./model",
        "trainer.logger": ["console", "wandb", "swanlab", "wnadb"],
    }
    found = problems(wrong)
    keys = ["data.train_files", *["data.val_files"] * 2, f"{MODEL}.path", *["trainer.logger"] * 3]
    assert [line.partition(" ")[0] for line in found] == keys
    assert "got '~/train.parquet', where there is no file; write the home folder out" in found[0]
    assert "got 'a.parquet', where there is no file; correct the path" in found[1]
    assert "must end in .parquet, .json, .jsonl, got 'b.csv'" in found[2]
    assert "must be a model's folder or its name on the Hub, got './model'" in found[3]
    assert "got 'wandb' without; set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline" in found[4]


def test_a_model_has_all_its_files_and_can_chat(problems: Problems, tmp_path: Path) -> None:
    model = tmp_path / "task" / "model"
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    (model / "1.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (problem,) = problems({})
    assert problem.startswith(f"{MODEL}.path must have all files of its index, got '{model}', which lacks 1,")
    index.unlink()
    (model / "1.safetensors").write_bytes(b"\x09" + bytes(7) + b"{}")
    (problem,) = problems({})
    assert problem.startswith(f"{MODEL}.path must have whole files, got '{model}/1.safetensors' (")
    (model / "1.safetensors").unlink()

    (model / "model.safetensors").rename(model / "weights")
    (problem,) = problems({})
    assert problem.startswith(
        f"{MODEL}.path must have weights (.safetensors, .bin, .pt, .pth), got '{model}'"
    )
    (model / "weights").rename(model / "pytorch_model.bin")
    assert not problems({})

    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    for file in bare.glob("chat_template*"):
        file.unlink()
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    (problem,) = problems({f"{MODEL}.path": str(bare)})
    assert problem.startswith(f"{MODEL}.custom_chat_template must be set for the tokenizer in {bare}: it has")
    template = "{{ messages[0]['content'] }}"
    assert not problems({f"{MODEL}.path": str(bare), f"{MODEL}.custom_chat_template": template})
    (problem,) = problems({f"{MODEL}.custom_chat_template": "{{ raise_exception('no system') }}"})
    assert "its chat template or special tokens do not fit (no system); correct them" in problem

    (bare / "config.json").unlink()
    assert "must be a folder with a config.json" in problems({f"{MODEL}.path": str(bare)})[0]
    for file in bare.glob("*token*"):
        file.unlink()
    (bare / "config.json").write_text("{}")
    (problem,) = problems({f"{MODEL}.path": str(bare)})
    assert problem.startswith(f"{MODEL}.tokenizer_path must name a folder with a tokenizer, got '{bare}'")


def test_a_teacher_has_the_tokens_of_the_policy(problems: Problems, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(tmp_path / "task" / "model", teacher)
    path = "distillation.teacher_models.teacher_model.model_path"
    distils = {"distillation.enabled": True, path: str(teacher), "ray_kwargs.ray_init.num_gpus": 3}
    assert not problems(distils)
    described = json.loads((teacher / "tokenizer.json").read_text())
    token = min(described["model"]["vocab"])
    described["model"]["vocab"]["other"] = described["model"]["vocab"].pop(token)
    (teacher / "tokenizer.json").write_text(json.dumps(described))
    (problem,) = problems(distils)
    assert problem.startswith(f"{path} must have the tokens of the policy, got '{teacher}', where 2 of ")
    (teacher / "config.json").unlink()
    assert f"{path} must be a folder with a config.json" in problems(distils)[0]


def test_models_of_the_hub_are_left_to_it_unless_it_is_off(
    module: ModuleType, problems: Problems, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {f"{MODEL}.path": "Qwen/Qwen3-8B"}
    monkeypatch.setattr(module.constants, "HF_HUB_OFFLINE", True)
    (problem,) = problems(there)
    assert "must be on this machine with HF_HUB_OFFLINE=1, got 'Qwen/Qwen3-8B'" in problem
    monkeypatch.setattr(module.constants, "HF_HUB_OFFLINE", False)
    assert not problems(there)


def test_a_checkpoint_to_resume_from_exists_or_is_elsewhere(
    launch: ModuleType, smoke: Smoke, tmp_path: Path
) -> None:
    changes = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match="resume_from_path must be an existing folder global_step_N, got "):
        launch.checked(smoke(changes))
    absent = list[str]()
    launch.checked(smoke(changes), absent=absent)
    assert any(line.startswith(f"trainer.resume_from_path={tmp_path}") for line in absent)
    launch.checked(smoke({**changes, "trainer.resume_from_path": str(tmp_path)}))


def test_the_engine_allows_no_longer_responses_than_the_data(launch: ModuleType, smoke: Smoke) -> None:
    launch.checked(smoke({f"{ROLLOUT}.response_length": 3}))
    with pytest.raises(
        ConfigError, match=rf"^{ROLLOUT}.response_length must be at most data.max_.*=4, got 5;"
    ):
        launch.checked(smoke({f"{ROLLOUT}.response_length": 5}))


@pytest.mark.parametrize(
    ("engine", "of_model", "line"),
    [
        (12, None, ""),
        (11, None, rf"must be at most 11, {ROLLOUT}.max_model_len, got 8 \+ 4 = 12; .*max_model_len=12$"),
        (None, 12, ""),
        (None, 11, "must be at most 11, the model's max_position_embeddings, got .*; lower one of them$"),
        (64, 32, f"^{ROLLOUT}.max_model_len must be at most 32, the model's max_position_embeddings, got 64"),
    ],
)
def test_a_prompt_and_its_response_fit_into_the_context(
    launch: ModuleType, smoke: Smoke, tmp_path: Path, engine: int | None, of_model: int | None, line: str
) -> None:
    config = smoke({f"{ROLLOUT}.max_model_len": engine})
    (tmp_path / "task" / "model" / "config.json").write_text(
        json.dumps({"max_position_embeddings": of_model})
    )
    if not line:
        launch.checked(config)
        return
    with pytest.raises(ConfigError, match=line):
        launch.checked(config)


@pytest.mark.parametrize(
    "key",
    [
        "trainer.default_local_dir",
        "trainer.rollout_data_dir",
        "trainer.validation_data_dir",
        "trainer.v1.async_pipeline.run_dir",
    ],
)
def test_a_folder_that_cannot_be_made(problems: Problems, tmp_path: Path, key: str) -> None:
    (tmp_path / "file").write_text("")
    (line,) = problems({key: str(tmp_path / "file" / "below")})
    assert line.startswith(f"{key} must be a folder that can be made, got '{tmp_path}/file/below', but ")
    assert not problems({key: str(tmp_path / "new" / "below")})


def test_only_folders_that_are_set_must_be_writable(
    problems: Problems, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    keys = ["trainer.default_local_dir", "trainer.rollout_data_dir"]
    changes = {keys[0]: str(tmp_path), keys[1]: None, "trainer.validation_data_dir": None}
    lines = problems({**changes, "trainer.v1.async_pipeline.run_dir": None})
    assert [line.partition(" ")[0] for line in lines if "can be made" in line] == keys[:1]


def test_a_model_and_a_tokenizer_are_named(problems: Problems) -> None:
    (line,) = problems({f"{MODEL}.tokenizer_path": "/no/tokenizer"})
    assert line.startswith(
        f"{MODEL}.tokenizer_path must be a model's folder or its name on the Hub, got '/no"
    )
    (line,) = problems({f"{MODEL}.path": None})
    assert line == f"{MODEL}.path must be a model's folder or its name on the Hub, got None; set it"


def test_a_tracker_with_credentials_is_accepted(
    problems: Problems, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = {"trainer.logger": ["wandb", "tensorboard"]}
    assert len(problems(asked)) == 1
    environment.setenv("WANDB_MODE", "offline")
    assert not problems(asked)
    environment.delenv("WANDB_MODE")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    assert not problems(asked)
    environment.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert problems(asked)


def test_trackers_are_verls(module: ModuleType, load: Load) -> None:
    tracking = load("verl.utils.tracking").Tracking
    assert set(tracking.supported_backend) | {"tracking"} == set(module.TRACKERS)
    source = inspect.getsource(load("verl.utils.rollout_trace").RolloutTraceConfig.init)
    assert re.findall(r'backend == "(\w+)"', source) == [*module.TRACERS]


@pytest.mark.parametrize(
    ("backend", "line"), [("foo", "must be of weave, "), ("weave", "must have installed ")]
)
def test_a_trace_of_rollouts_has_its_package(problems: Problems, backend: str, line: str) -> None:
    (problem,) = problems({f"{ROLLOUT}.trace.backend": backend})
    assert problem.startswith(f"{ROLLOUT}.trace.backend {line}") and f"got '{backend}'" in problem


def test_a_trace_of_rollouts_has_an_account(
    problems: Problems, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "weave.py").touch()
    environment.syspath_prepend(tmp_path)
    (problem,) = problems({f"{ROLLOUT}.trace.backend": "weave"})
    assert "must have trackers with credentials, got 'weave' without; set WANDB_API_KEY" in problem
    environment.setenv("WANDB_API_KEY", "x" * 40)
    assert not problems({f"{ROLLOUT}.trace.backend": "weave"})


def test_explain_notes_what_is_elsewhere_and_refuses_what_is_wrong(
    smoke: Smoke, tmp_path: Path, environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["explain", "--config-path", str(REPOSITORY / "configs"), "--config-name", "smoke_cpu"]
    missing = [
        f"data.train_files={tmp_path}/no.parquet",
        f"{MODEL}.path={tmp_path}/no",
        "trainer.logger=wandb",
    ]
    assert main([*asked, *missing]) == 0
    out = capsys.readouterr().out
    assert f"not checked: data.train_files={tmp_path}/no.parquet, which is not on this machine" in out
    assert f"not checked: {MODEL}.path={tmp_path}/no, which is not on this machine" in out
    assert "not checked: trainer.logger=wandb, whose credentials are not on this machine" in out
    assert main([*asked, "data.train_max_samples=3"]) == 2
    assert "must have at least data.train_batch_size=16 rows" in capsys.readouterr().err


def test_a_run_on_a_cluster_may_have_its_files_there(
    launch: ModuleType, smoke: Smoke, tmp_path: Path
) -> None:
    config = smoke({"data.train_files": str(tmp_path / "no.parquet"), "ray_kwargs.ray_init.address": "far:1"})
    assert launch.checked(config).unchecked == (
        f"data.train_files={tmp_path / 'no.parquet'}, which is not on this machine",
    )


def test_engines_and_adapters_need_their_packages(
    problems: Problems, launch: ModuleType, smoke: Smoke
) -> None:
    strategy = "actor_rollout_ref.actor.strategy"
    (line,) = problems({strategy: "fsdp_turbo", "actor_rollout_ref.ref.strategy": "fsdp_turbo"})
    assert line.startswith(f"{strategy} must be an installed engine, got 'fsdp_turbo'; install fsdp_turbo")
    (line,) = problems({f"{MODEL}.use_liger": True})
    assert line.startswith(f"{MODEL}.use_liger must be False without the package liger_kernel, got True;")
    lora = {f"{MODEL}.lora_rank": 8, f"{ROLLOUT}.load_format": "auto"}
    (line,) = problems({strategy: "fsdp_turbo", **lora})
    assert line.startswith(f"{strategy} must be fsdp2 or megatron with LoRA, got 'fsdp_turbo'; adapters of")


def test_adapters_are_of_layers_of_the_model(problems: Problems, tmp_path: Path) -> None:
    weights = {"layers.0.q_proj.weight": np.zeros((2, 2))}
    save_file(weights, tmp_path / "task" / "model" / "model.safetensors")
    lora = {f"{MODEL}.lora_rank": 8, f"{ROLLOUT}.load_format": "auto"}
    for targets in (["q_proj", "v"], "all-linear", ".*qproj"):
        assert not problems({**lora, f"{MODEL}.target_modules": targets})
    (line,) = problems({**lora, f"{MODEL}.target_modules": ["qproj"]})
    assert line.startswith(f"{MODEL}.target_modules must name layers of the model, got ['qproj'], which")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"optimizer": "adamw"}, "must be a class of torch.optim (Adafactor, .*, got 'adamw' (did you mean"),
        ({"optimizer": "SGD"}, ""),
        ({"optimizer_impl": "bitsandbites.optim"}, "must be an installed module, got 'bitsandbites.optim'"),
        ({"optimizer_impl": "torch.optimm"}, "must be an installed module, got 'torch.optimm'; install it"),
        ({"optimizer_impl": "tests.fakes", "optimizer": "AdamW8bit"}, ""),
    ],
)
def test_an_optimizer_of_fsdp_can_be_imported(problems: Problems, changes: dict[str, Any], line: str) -> None:
    found = problems({f"actor_rollout_ref.actor.optim.{key}": value for key, value in changes.items()})
    path = f"actor_rollout_ref.actor.optim.{next(iter(changes))}"
    assert [problem.partition(" ")[0] for problem in found] == ([path] if line else [])
    assert re.search(".*".join(map(re.escape, line.split(".*"))), "".join(found))
