# SPDX-License-Identifier: Apache-2.0
"""The install scripts for GPUs run what `--dry-run` prints, with extras and overrides that verl has."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests import REPOSITORY

FOLDER = REPOSITORY / "run_scripts"
TRAINERS, ENGINES = ("fsdp", "megatron"), ("vllm", "sglang")
SCRIPTS = [f"install_{trainer}_{engine}.sh" for trainer in TRAINERS for engine in ENGINES]
VERL = REPOSITORY / ".cache" / "verl" / "verl-0.9.1" / "pyproject.toml"

STANDIN = """#!/bin/sh
printf '%s\\n' "$(basename "$0") $*" >> "$CALLS"
[ "$1" != venv ] || {
  for last in "$@"; do :; done
  mkdir -p "$last/bin"
  cp "$0" "$last/bin/python"
  cp "$0" "$last/bin/async-pipeline"
}
"""


class Machine:
    """A folder with a stand-in for uv, which records what it is called with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.venv = folder, folder / "calls", folder / "venv"
        (folder / "bin").mkdir()
        (folder / "bin" / "uv").write_text(STANDIN, encoding="utf-8")
        (folder / "bin" / "uv").chmod(0o700)

    def run(self, script: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "VENV": str(self.venv),
            "VERL_DIR": str(self.folder / "verl"),
        }
        return subprocess.run(
            ["bash", str(FOLDER / script), *arguments],
            env=environment | settings,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def called(self) -> list[str]:
        """Return the calls, each as the name of the program and its arguments."""
        return self.calls.read_text(encoding="utf-8").splitlines() if self.calls.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def commands(printed: str) -> list[str]:
    """Return the printed commands in the form of `Machine.called`, without settings of the environment."""
    found = []
    for line in printed.splitlines():
        words = [word for word in shlex.split(line) if word != "env" and not re.match(r"[A-Z_]+=", word)]
        found.append(" ".join([Path(words[0]).name, *words[1:]]))
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_prints_what_a_run_does_and_does_nothing(script: str, machine: Machine) -> None:
    dry = machine.run(script, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert machine.called() == [] and not machine.venv.exists()

    done = machine.run(script)
    assert done.returncode == 0, done.stderr
    assert commands(dry.stdout) == machine.called()
    _, trainer, engine = script.removesuffix(".sh").split("_")
    (sync,) = (call for call in machine.called() if call.startswith("uv sync"))
    assert sync.endswith(f"--extra {trainer} --extra {engine}")
    assert machine.called()[-1] == "async-pipeline doctor"


def test_the_lock_of_a_clone_decides_about_versions(machine: Machine) -> None:
    clone = machine.folder / "verl"
    clone.mkdir()
    (clone / "uv.lock").touch()
    assert machine.run(SCRIPTS[0]).returncode == 0
    assert any(call.startswith("uv sync") and call.endswith(" --frozen") for call in machine.called())


def test_resolving_installs_nothing_but_what_fetching_needs(machine: Machine) -> None:
    assert machine.run(SCRIPTS[1], "--resolve").returncode == 0
    assert [call.split()[:3] for call in machine.called()] == [
        ["uv", "venv", "--allow-existing"],
        ["uv", "pip", "install"],
        ["python", "-m", "recipe.async_pipeline"],
        ["uv", "pip", "compile"],
    ]
    assert "--extra fsdp --extra sglang" in machine.called()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--dry",), "the options are --dry-run and --resolve, got --dry"), (("--resolve", "x"), "one option")],
)
def test_a_wrong_option_is_one_line(arguments: tuple[str, ...], message: str, machine: Machine) -> None:
    done = machine.run(SCRIPTS[0], *arguments)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_shared_script_alone_names_the_four() -> None:
    done = subprocess.run(["bash", str(FOLDER / "install.sh")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "install_{fsdp,megatron}_{vllm,sglang}.sh" in done.stderr


@pytest.mark.skipif(not VERL.exists(), reason="no verl source in .cache")
def test_the_extras_and_overrides_are_verls() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads(VERL.read_text(encoding="utf-8"))
    assert {*TRAINERS, *ENGINES} <= set(project["project"]["optional-dependencies"])

    lines = (FOLDER / "gpu.overrides.txt").read_text(encoding="utf-8").splitlines()
    ours = [line for line in lines if not line.startswith("#")]
    left_out = {line.split()[0] for line in ours if line.endswith("'never'")}
    uv = project["tool"]["uv"]
    verls = {re.split("[=<> ]", line)[0]: line for line in uv["override-dependencies"]}
    for line in ours:
        name = re.split("[=<> ]", line)[0]
        assert name in left_out or line == verls[name]

    # mbridge is on the package index too, so it is resolved there.
    elsewhere = {
        name for name, source in uv["sources"].items() if isinstance(source, dict) and name != "mbridge"
    }
    assert left_out == elsewhere | {"flash-attn-4"}
