# SPDX-License-Identifier: Apache-2.0
"""The entry point for images starts from its own config file, which takes the keys of whole scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.async_pipeline.verl_bridge.main_flowgrpo import CONFIGS, arguments_of
from tests.fakes.alias_values import FLAT, NESTED
from tests.fakes.tiny_flow import tiny_folder


def test_the_config_file_is_named() -> None:
    assert arguments_of(["a=1"]) == ["--config-path", str(CONFIGS), "--config-name", "diffusion", "a=1"]
    assert (CONFIGS / "diffusion.yaml").is_file()


@pytest.mark.parametrize("option", ["--config-name", "--config-name=mine", "-cn", "--config-dir"])
def test_another_config_file_may_be_named(option: str) -> None:
    assert arguments_of([option, "mine"]) == [option, "mine"]


@pytest.mark.real_engine
@pytest.mark.parametrize(("keys", "side"), [(FLAT, 384), (NESTED, 384)])
def test_whole_scripts_are_understood(keys: dict[str, object], side: int, tmp_path: Path) -> None:
    """Without a plus in front of a key, as their users type them."""
    pytest.importorskip("diffusers")
    overrides = [f"{path}={json.dumps(value)}" for path, value in keys.items()]
    command = [
        *(sys.executable, "-m", "recipe.async_pipeline", "explain", "--json"),
        *("--config-path", str(CONFIGS), "--config-name", "diffusion", *overrides),
        f"actor_rollout_ref.model.path={tiny_folder(tmp_path / 'model')}",
        "reward.custom_reward_function.path=pkg://recipe.async_pipeline.toy.image_reward",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    notes = json.loads(done.stdout)["notes"]
    assert any(note.endswith("diffusion.sde_window_first=0, diffusion.sde_window_end=5") for note in notes)
    assert any(f"diffusion.height={side}" in note for note in notes)
