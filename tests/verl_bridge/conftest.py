# SPDX-License-Identifier: Apache-2.0
"""The shipped smoke config, composed once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict
from safetensors.numpy import save_file

from recipe.async_pipeline.installed.verl import find_verl_root
from recipe.async_pipeline.lab.tasks.data import write_rows
from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer
from recipe.async_pipeline.observe.table import MARK
from recipe.async_pipeline.verl_bridge.launch.run_config import copy_of
from tests import REPOSITORY
from tests.conftest import Load

Smoke = Callable[..., DictConfig]


def compose_smoke(*overrides: str) -> DictConfig:
    """Compose the shipped smoke config; this takes a second or more."""
    GlobalHydra.instance().clear()
    search = f"hydra.searchpath=[file://{find_verl_root() / 'verl' / 'trainer' / 'config'}]"
    with initialize_config_dir(config_dir=str(REPOSITORY / "configs"), version_base=None):
        return compose(config_name="smoke_cpu", overrides=[search, *overrides])


@pytest.fixture(scope="session")
def base() -> DictConfig:
    # A file, which each test's check loads in a tenth of the time that this package takes as a module.
    path = REPOSITORY / "recipe" / "async_pipeline" / "lab" / "tasks" / "reward.py"
    return compose_smoke(f"reward.custom_reward_function.path={path}")


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data for large batches, and with a model that has a tokenizer and no tensors."""
    folder = tmp_path_factory.mktemp("made") / "task"
    make_tokenizer().save_pretrained(folder / "model")
    for name in ("config.json", "model_index.json"):
        (folder / "model" / name).write_text("{}")
    save_file({}, folder / "model" / "model.safetensors")
    for name, rows in (("train", 4096), ("val", 1)):
        row = {"prompt": [{"role": "user", "content": "1+1="}], "data_source": "sums"}
        write_rows([{**row, "reward_model": {"ground_truth": "2"}}] * rows, folder / f"{name}.parquet")
    return folder


@pytest.fixture
def smoke(base: DictConfig, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smoke:
    """Return a factory of changed copies of the shipped smoke config, whose task is in the test's folder."""
    shutil.copytree(task, tmp_path / "task")
    monkeypatch.setenv("ASYNC_PIPELINE_TASK", str(tmp_path / "task"))
    monkeypatch.chdir(tmp_path)

    def make(changes: dict[str, Any] | None = None, *, switched_on: bool = True) -> DictConfig:
        config = copy_of(base)
        with open_dict(config):
            if switched_on:
                config.async_pipeline = True
            for path, value in (changes or {}).items():
                OmegaConf.update(config, path, value, force_add=True)
        return config

    return make


@pytest.fixture(scope="module")
def launch(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.launch.prepare")


def refused(launch: ModuleType, config: DictConfig, capsys: pytest.CaptureFixture[str]) -> str:
    """Require that `prepare` ends the process; return its line on standard error, or the numbered lines.

    All have the mark, because `watch` shows no others; it is left out of the returned ones but the first.
    """
    # As it is written: to resolve every interpolation of two configs takes longer than all checks.
    before = OmegaConf.to_container(config, resolve=False)
    with pytest.raises(SystemExit) as ended:
        launch.prepare(config)
    assert ended.value.code == 2
    assert OmegaConf.to_container(config, resolve=False) == before, "a refused config is unchanged"
    first, *more = capsys.readouterr().err.splitlines()
    assert all(line.startswith(f"{MARK} ") for line in (first, *more))
    assert not more or first == f"{MARK} {len(more)} problems:"
    return "\n".join([first, *(line.removeprefix(f"{MARK} ") for line in more), ""])
