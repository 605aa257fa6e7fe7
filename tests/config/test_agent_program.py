# SPDX-License-Identifier: Apache-2.0
"""The program of an agent is checked before the run, and its files are found from any folder."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from recipe.async_pipeline.config import agent_program
from recipe.async_pipeline.config.agent_program import hidden_paths, program_values, runnable
from recipe.async_pipeline.config.agentic import EXTERNAL, AgenticConfig, GatewayConfig
from recipe.async_pipeline.errors import ConfigError

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


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        (
            "no_such_program x",
            "must be module:function, external or a command whose program exists, got 'no_such_prog",
        ),
        ("", "must be module:function, external or a command"),
        ("extern", r"got 'extern' \(did you mean 'external'\?\); correct it"),
        ("basin", r"got 'basin'; correct it"),
        (
            "./plain.py x",
            r"a file that is not executable; chmod \+x ./plain.py, or write 'python ./plain.py'",
        ),
        ("./plain.sh", r"a file that is not executable; chmod \+x ./plain.sh$"),
        ("python 'x", r"must be a command, got .* \(No closing quotation\); correct its quotes"),
        ("no_such_module:run", "names module 'no_such_module', which cannot be found, .*; check PYTHONPATH"),
        ("no_such_package.module:run", "which cannot be found"),
        ("jsno:dump", r"cannot be found, got 'jsno:dump' \(did you mean 'json'\?\); check PYTHONPATH"),
        ("json.decodr:dump", r"\(did you mean 'json.decoder'\?\); check PYTHONPATH"),
        ("json:dmup", r"which the module does not define \(did you mean 'dump'\?\); correct the name"),
        ("json:JSONDecoder", None),
        ("json.decoder:JSONDecoder", "which is a class; name a function"),
        (
            "json:loads",
            r"can be called with 2 arguments, got 'json:loads', whose arguments are \(s, \*, cls=",
        ),
        (
            "./my_agnet.sh --fast",
            r"got './my_agnet.sh --fast' \(did you mean './my_agent.sh'\?\); correct it",
        ),
        ("pythn3 my_agent.py", r"\(did you mean 'python3'\?\); correct it"),
        ("python3 -u my_agnet.py", r"no file /.*/my_agnet.py \(did you mean 'my_agent.py'\?\); correct it"),
        ("python3 -m my_agnet", None),
        ("python3 my_agent.py none.json", None),
        ("bash -c my_agnet.sh", None),
    ],
)
def test_what_cannot_be_run(
    agent: str, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("my_agent.py", "my_agent.sh", "python3", "bash"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    for name in ("plain.py", "plain.sh"):
        (tmp_path / name).write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    if why is None:
        program_values(AgenticConfig(agent=agent))
        return
    with pytest.raises(ConfigError, match=rf"agentic\.agent .*{why}"):
        program_values(AgenticConfig(agent=agent))


def test_verify_is_checked_as_well() -> None:
    with pytest.raises(ConfigError, match=r"agentic\.verify must be"):
        program_values(AgenticConfig(agent="json:dump", verify="no_such_program"))


def test_verify_is_a_command_only() -> None:
    with pytest.raises(ConfigError, match=r"verify must be a command .*, a function; write a command that"):
        program_values(AgenticConfig(agent="json:dump", verify="json:dump"))


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_program, "PACKAGES", ("json", "no_such_package"))
    with pytest.raises(
        ConfigError, match=r"requires json, no_such_package; pip install async_pipeline\[agen"
    ):
        program_values(AgenticConfig(agent="json:dump"))
