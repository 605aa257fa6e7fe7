# SPDX-License-Identifier: Apache-2.0
"""The entry point for images starts from its own config file, which takes the keys of whole scripts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.cli.main import main
from recipe.async_pipeline.verl_bridge import main_flowgrpo
from recipe.async_pipeline.verl_bridge.main_flowgrpo import CONFIGS, arguments_of
from tests.conftest import Load
from tests.fakes.alias_values import ACTOR, FLAT, GERL_REFUSED, GERL_SCRIPTS, NESTED
from tests.fakes.tiny_flow import tiny_folder


def test_the_config_file_is_named() -> None:
    assert arguments_of(["a=1"]) == ["--config-path", str(CONFIGS), "--config-name", "diffusion", "a=1"]
    assert (CONFIGS / "diffusion.yaml").is_file()


@pytest.mark.parametrize("option", ["--config-name", "--config-name=mine", "-cn", "--config-dir"])
def test_another_config_file_may_be_named(option: str) -> None:
    assert arguments_of([option, "mine"]) == [option, "mine"]


def overrides_of(keys: dict[str, Any], model: Path) -> list[str]:
    """What their users type: without a plus in front of a key."""
    return [
        *(f"{path}={json.dumps(value)}" for path, value in keys.items()),
        f"actor_rollout_ref.model.path={model}",
        "reward.custom_reward_function.path=pkg://recipe.async_pipeline.lab.tasks.image_task.image_reward",
    ]


@pytest.fixture(scope="module")
def folder(load: Load, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("diffusers")
    load("recipe.async_pipeline.verl_bridge.launch.prepare")
    return tiny_folder(tmp_path_factory.mktemp("pipeline") / "model")


def explained(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `explain` says to the entry point's arguments."""
    status = main(["explain", "--json", *arguments_of(overrides)])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    said: dict[str, Any] = json.loads(printed.out)
    return said


@pytest.mark.real_engine
@pytest.mark.parametrize("keys", [FLAT, NESTED])
def test_whole_scripts_are_understood(
    keys: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"data.train_batch_size": 8, f"{ACTOR}.ppo_mini_batch_size": 4}
    notes = explained(overrides_of(keys | sizes, folder), capsys)["notes"]
    assert any(note.endswith("diffusion.sde_window_first=0, diffusion.sde_window_end=5") for note in notes)
    assert any("diffusion.height=384" in note for note in notes)


@pytest.mark.real_engine
@pytest.mark.parametrize("name", GERL_SCRIPTS)
def test_gerls_scripts_are_understood(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what they ask for by default: batches of one step before, scored while others are drawn."""
    script = GERL_SCRIPTS[name]
    plan = explained(overrides_of(script.keys, folder), capsys)
    assert (plan["strategy"], plan["max_lag"]) == ("one_step_off", 1)
    assert (plan["groups_per_step"], plan["responses_per_group"]) == (script.batch, 8)
    assert plan["mini_batches_per_step"] == script.batch // script.mini_batch
    devices = {pool["name"]: pool["per_node"] for pool in plan["placement"]}
    assert devices == {"train": [script.actors], "generate": [script.rollouts]}
    assert (plan["old_logp"], plan["adapters_alone"]) == ("rollout", True)
    assert (
        f"{ACTOR}.n_gpus_per_node={script.actors} -> trainer.n_gpus_per_node={script.actors}"
        in (plan["notes"])
    )


@pytest.mark.real_engine
def test_a_script_is_rewritten_before_verl_reads_it(
    load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config file has the switch, which the command line lacks."""
    received: list[str] = []
    monkeypatch.setattr(load("verl.trainer.main_ppo"), "main", lambda: received.extend(sys.argv))
    script = overrides_of(GERL_SCRIPTS["3p_a1_r2"].keys, folder)
    monkeypatch.setattr(sys, "argv", ["main_flowgrpo.py", *script])
    main_flowgrpo.main()
    assert received[1:5] == arguments_of([])
    assert not any(word.startswith("reward_model.") for word in received)
    assert any(word.startswith("reward.reward_manager.name=") for word in received)


@pytest.mark.real_engine
@pytest.mark.parametrize("path", GERL_REFUSED)
def test_what_gerls_scripts_say_about_rewards_is_refused_with_a_remedy(
    path: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = GERL_SCRIPTS["3p_a1_r2"].keys | {path: GERL_REFUSED[path]}
    assert main(["explain", *arguments_of(overrides_of(keys, folder))]) == 2
    *notes, error = capsys.readouterr().err.splitlines()
    assert f"{path} must be left out with this pipeline" in error
    assert all(" -> " in note or note.startswith("not checked: ") for note in notes)
