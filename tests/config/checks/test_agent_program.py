# SPDX-License-Identifier: Apache-2.0
"""The program of an agent is checked before the run, and its files are found from any folder."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from recipe.async_pipeline.config.checks import agent_program
from recipe.async_pipeline.config.checks.agent_program import hidden_paths, program_values, runnable
from recipe.async_pipeline.config.knobs.agentic import EXTERNAL, AgenticConfig, GatewayConfig
from recipe.async_pipeline.errors import ConfigError
from tests.refusals import Refused, cases_of

AGENT, VERIFY = f"{AgenticConfig.PATH}.agent", f"{AgenticConfig.PATH}.verify"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_program, "PACKAGES", ("json",))


def test_files_of_commands_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my agent.py").write_text("")
    monkeypatch.chdir(tmp_path)
    command = f"{sys.executable} 'my agent.py' --fast other.py"
    found = program_values(AgenticConfig(agent=command, verify=command))
    expected = [sys.executable, str(tmp_path / "my agent.py"), "--fast", "other.py"]
    assert {path: shlex.split(value) for path, value in found.items()} == {AGENT: expected, VERIFY: expected}
    assert runnable(found[AGENT], AGENT) == found[AGENT], "absolute paths stay"


def test_words_that_are_no_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    found = shlex.split(runnable("echo docs '' ./docs docs/", AGENT))
    assert found[1:] == ["docs", "", str(tmp_path / "docs"), str(tmp_path / "docs")]


def test_functions_stay_as_they_are() -> None:
    assert program_values(AgenticConfig()) == {}
    assert program_values(AgenticConfig(agent="json:dump")) == {}


def test_external_runners_are_no_program_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = program_values(
        AgenticConfig(agent=EXTERNAL, verify=sys.executable, gateway=GatewayConfig(runners_dir="runners"))
    )
    assert found == {f"{GatewayConfig.PATH}.runners_dir": str(tmp_path / "runners"), VERIFY: sys.executable}


def test_what_agents_do_not_see_of_a_run() -> None:
    config = {
        "trainer.v1.async_pipeline_runtime.run_dir": "/runs/a",
        "data.train_files": ["/data/train.parquet", "hdfs://host/more.parquet"],
        "data.val_files": "/data/val.parquet",
        "actor_rollout_ref.model.path": "/models/a",
    }
    knobs = AgenticConfig(agent="m:f", sandbox_hidden=("/sources",))
    expected = {"/sources", "/runs/a", "/data/train.parquet", "/data/val.parquet"}
    assert set(hidden_paths(config.get, knobs)) == expected


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("my_agent.py", "my_agent.sh", "python3", "bash"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    for name in ("plain.py", "plain.sh"):
        (tmp_path / name).write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@cases_of("agent")
@pytest.mark.usefixtures("programs")
def test_what_cannot_be_run(case: Refused) -> None:
    case.replay(lambda knobs: program_values(AgenticConfig(**knobs)))


@pytest.mark.parametrize(
    "agent",
    ["json:JSONDecoder", "python3 -m my_agnet", "python3 my_agent.py none.json", "bash -c my_agnet.sh"],
)
@pytest.mark.usefixtures("programs")
def test_what_may_be_a_program_is_accepted(agent: str) -> None:
    program_values(AgenticConfig(agent=agent))


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_program, "PACKAGES", ("json", "no_such_package"))
    with pytest.raises(
        ConfigError, match=r"requires json, no_such_package; pip install async_pipeline\[agen"
    ):
        program_values(AgenticConfig(agent="json:dump"))
