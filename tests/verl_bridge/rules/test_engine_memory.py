# SPDX-License-Identifier: Apache-2.0
"""Devices that only generate are not left half empty, and what the user wrote is kept."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from recipe.async_pipeline.config.paths import MODE, OWN, PATCH_FREE
from recipe.async_pipeline.observe.table import MARK
from recipe.async_pipeline.verl_bridge.rules.engine_memory import (
    ARGUMENTS,
    ROLLOUT,
    SHARE,
    SHARES,
    STANDALONE,
    VERLS_DEFAULT,
)
from tests.verl_bridge.conftest import Smoke

pytestmark = pytest.mark.real_engine

GPUS = {"trainer.device": "cuda"}
STAGED = {f"{OWN}.weight_sync.load_staging": "device"}
ADAPTERS = {
    "actor_rollout_ref.model.lora_rank": 8,
    "actor_rollout_ref.model.target_modules": "all-linear",
    f"{ROLLOUT}.load_format": "auto",
}


def notes_on(launch: ModuleType, config: DictConfig, *overrides: str) -> list[str]:
    """Set verl's keys; return the lines about the share."""
    checked = launch.checked(config)
    return [note for note in launch.set_verls_keys(config, checked, overrides) if SHARE in note]


def share(config: DictConfig) -> Any:
    return OmegaConf.select(config, SHARE)


@pytest.mark.parametrize("engine", SHARES)
@pytest.mark.parametrize("more", [{}, STAGED | ADAPTERS], ids=["weights", "adapters"])
def test_verls_default_is_raised_with_one_line(
    launch: ModuleType, smoke: Smoke, engine: str, more: dict[str, Any]
) -> None:
    config = smoke({**GPUS, f"{ROLLOUT}.name": engine, **more})
    assert share(config) == VERLS_DEFAULT
    (line,) = notes_on(launch, config, "trainer.n_gpus_per_node=4")
    assert share(config) == SHARES[engine]
    assert line.startswith(f"{SHARE}={SHARES[engine]} instead of verl's default 0.5: ") and "\n" not in line
    assert f"set another value, or {ROLLOUT}.engine_kwargs.{engine}.{ARGUMENTS[engine][0]}, to choose" in line


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_default_that_the_user_wrote_is_kept(launch: ModuleType, smoke: Smoke, prefix: str) -> None:
    config = smoke(GPUS)
    assert notes_on(launch, config, f"{prefix}{SHARE}=0.5") == []
    assert share(config) == VERLS_DEFAULT


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({**GPUS, SHARE: 0.6}, 0.6),
        ({**GPUS, f"{ROLLOUT}.engine_kwargs.vllm.gpu_memory_utilization": 0.7}, VERLS_DEFAULT),
        ({**GPUS, f"{ROLLOUT}.engine_kwargs.vllm.gpu-memory-utilization": 0.7}, VERLS_DEFAULT),
        ({**GPUS, f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes": 10**9}, VERLS_DEFAULT),
        (
            {
                **GPUS,
                f"{ROLLOUT}.name": "sglang",
                f"{ROLLOUT}.engine_kwargs.sglang.mem_fraction_static": 0.7,
            },
            VERLS_DEFAULT,
        ),
        ({}, VERLS_DEFAULT),
    ],
    ids=["share", "argument", "dashes", "bytes", "sglang", "cpu"],
)
def test_other_runs_are_left_alone(
    launch: ModuleType, smoke: Smoke, changes: dict[str, Any], kept: float
) -> None:
    config = smoke(changes)
    assert notes_on(launch, config) == []
    assert share(config) == kept


def test_a_second_copy_of_the_weights_keeps_its_room(launch: ModuleType, smoke: Smoke) -> None:
    config = smoke(GPUS | STAGED)
    (line,) = notes_on(launch, config)
    assert line.startswith(f"{SHARE}=0.5: the rest has room for load_staging=device; ")
    assert share(config) == VERLS_DEFAULT


def test_verls_share_of_replicas_with_their_own_devices_is_honoured(launch: ModuleType, smoke: Smoke) -> None:
    config = smoke({**GPUS, SHARE: 0.4, STANDALONE: 0.9})
    (line,) = notes_on(launch, config)
    assert (share(config), line) == (0.9, f"{STANDALONE} -> {SHARE}=0.9")


def test_a_run_reads_its_command_line(
    launch: ModuleType, smoke: Smoke, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with initialize_config_module("verl.trainer.config", version_base=None):
        composed = compose("ppo_trainer", [f"{SHARE}=0.5"], return_hydra_config=True)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    for written in (False, True):
        if written:
            HydraConfig.instance().set_config(composed)
        config = smoke(GPUS)
        launch.prepare(config)
        lines = [line for line in capsys.readouterr().out.splitlines() if SHARE in line]
        assert share(config) == (VERLS_DEFAULT if written else SHARES["vllm"])
        assert [line.startswith(f"{MARK} {SHARE}=0.85 ") for line in lines] == ([] if written else [True])


def test_a_run_of_an_unpatched_verl_gets_the_same_share(
    launch: ModuleType, smoke: Smoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "require_devices", lambda *asked: None)
    config = smoke({**GPUS, MODE: PATCH_FREE}, switched_on=False)
    OmegaConf.resolve(config)
    launch.adopt(config)
    assert share(config) == SHARES["vllm"]
