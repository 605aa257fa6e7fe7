# SPDX-License-Identifier: Apache-2.0
"""Options of `async-pipeline soak`, and the checks before anything starts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.cli import soak
from recipe.async_pipeline.lab.soak import faults


def test_faults_are_chosen_by_name() -> None:
    addition, lake, tool, agent, distill = (
        set(soak.kinds_of("all", task)) for task in get_args(faults.SoakTask)
    )
    assert addition | lake | tool | agent | distill == set(faults.FAULTS)
    assert {"kill_teacher"} == distill - lake
    assert {"agent_killed", "agent_hung", "client_retries"} == agent - lake
    assert {"tool_raises", "tool_hung"} == tool - lake
    assert {"env_hung", "env_died", "env_raises"} == lake - addition
    assert {"slow_reward", "raising_reward", "hanging_reward"} == addition - lake
    assert soak.kinds_of("burst, kill_run,burst", "addition") == ("burst", "kill_run")
    with pytest.raises(ConfigError, match="--faults: unknown 'earthquake'; choose from kill_engine, "):
        soak.kinds_of("burst,earthquake", "lake")
    with pytest.raises(ConfigError, match="--faults: env_hung requires --task lake, got addition; name"):
        soak.kinds_of("burst,env_hung", "addition")


def test_the_files_of_a_run_are_on_one_disk_and_it_may_save_before_it_ends(tmp_path: Path) -> None:
    given = soak.overrides(tmp_path, "addition")
    folders = [one.rpartition("=")[2].strip("'") for one in given if "run_dir=" in one or "local_dir=" in one]
    assert len(folders) == 2 and all(Path(folder).parent == tmp_path / "disk" for folder in folders)
    assert any(one.endswith("faults.notice_s=60.0") for one in given)


def test_a_lake_has_environments_that_can_fail(tmp_path: Path) -> None:
    given = soak.overrides(tmp_path, "lake")
    assert "+task=lake" in given
    assert any("MoodyLake" in one for one in given) and not any("custom_reward" in one for one in given)
    assert not any("+task" in one or "MoodyLake" in one for one in soak.overrides(tmp_path, "addition"))


def test_an_agent_is_a_command_whose_processes_are_found(tmp_path: Path) -> None:
    given = soak.overrides(tmp_path, "lake_agent")
    assert "+task=lake_agent" in given
    (agent,) = (one for one in given if ".agentic.agent=" in one)
    assert f" -m recipe.async_pipeline.lab.soak.lake_agent {tmp_path}/mood" in agent
    (variables,) = (one for one in given if ".agentic.agent_env=" in one)
    assert f"ASYNC_PIPELINE_SOAK:'{tmp_path}'" in variables


def test_a_teacher_has_a_device_and_a_short_deadline(tmp_path: Path) -> None:
    given = soak.overrides(tmp_path, "distill")
    assert "+task=distill" in given and "++ray_kwargs.ray_init.num_gpus=4" in given
    assert f"++trainer.v1.async_pipeline.faults.wait_timeout_s={soak.TEACHER_S}" in given


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    return parser.parse_args(list(words))


def test_invalid_options_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    for minutes in ("0.5", "nan", "inf"):
        with pytest.raises(ConfigError, match=f"--minutes must be at least 1, got {minutes}"):
            soak.run(parsed("--minutes", minutes))
    with pytest.raises(ConfigError, match="is not an empty folder; name another"):
        soak.run(parsed("--logs", str(tmp_path)))
    with pytest.raises(ConfigError, match="mine is not an empty folder; name another"):
        soak.run(parsed("--logs", str(tmp_path / "mine")))
    with pytest.raises(ConfigError, match="mine/logs cannot be created"):
        soak.run(parsed("--logs", str(tmp_path / "mine" / "logs")))


def test_a_soak_that_ends_early_prints_where_its_logs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(soak, "ensure_toy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        soak.run(parsed("--minutes", "2", "--faults", "burst,kill_run,kill_engine", "--logs", str(tmp_path)))
    output = capsys.readouterr().err
    assert "--minutes 2 has room for about 2 of 3 kinds of faults" in output
    assert f"logs are in {tmp_path}" in output


def test_the_help_names_every_fault() -> None:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    assert all(name in parser.format_help() for name in faults.FAULTS)
