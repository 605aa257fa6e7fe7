# SPDX-License-Identifier: Apache-2.0
"""`setup.py` lists every package that is imported, and `cpu.in.txt` lists the same packages."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.async_pipeline import __version__
from recipe.async_pipeline.tools.patches.verl_source import read_pin
from tests import HANG_S, REPOSITORY
from tests.source_tree import MODULES, PACKAGE, nodes_of

DISTRIBUTIONS = {"PIL": "pillow", "hydra": "hydra-core", "yaml": "pyyaml"}
"""Distribution names that differ from the name that is imported."""
STACK = {
    "huggingface_hub", "megatron", "peft", "ray", "sglang", "tensordict", "tokenizers", "torch",
    "transfer_queue",
    "transformers", "verl", "vllm", "xgrammar",
}  # fmt: skip
"""Packages that come with verl and the engine, in versions that depend on the machine."""


def lists() -> dict[str, list[str]]:
    """Return the literal lists of requirements in setup.py, by name."""
    tree = ast.parse((REPOSITORY / "setup.py").read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    return {
        target.id: ast.literal_eval(node.value)
        for node in assigned
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.endswith("_REQUIRES")
    }


def imported() -> Iterator[tuple[str, str]]:
    """Yield the top-level name and the file of each third-party import."""
    for module in MODULES:
        for node in nodes_of(module):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            for name in names:
                top = name.split(".")[0]
                if top not in sys.stdlib_module_names and top != "recipe":
                    yield top, module


def test_requirements_and_imports_match() -> None:
    required = {
        name for kind in ("INSTALL", "BENCH", "AGENTIC", "DIFFUSION") for name in lists()[f"{kind}_REQUIRES"]
    }
    needed = {DISTRIBUTIONS.get(name, name): where for name, where in imported() if name not in STACK}
    assert set(needed) - required == set(), f"imported, not required: {needed}"
    assert required - set(needed) == set(), "required, never imported"


@pytest.mark.parametrize(
    "name", [f"{kind}_REQUIRES" for kind in ("INSTALL", "BENCH", "AGENTIC", "DIFFUSION", "DEV")]
)
def test_the_lock_file_has_the_same_requirements(name: str) -> None:
    text = (REPOSITORY / "run_scripts" / "cpu.in.txt").read_text(encoding="utf-8")
    listed = {re.split(r"[\s=<>\[]", line)[0].lower() for line in text.splitlines()}
    assert set(lists()[name]) - listed == set()


@pytest.mark.slow
def test_the_stack_is_still_imported() -> None:
    assert STACK == {name for name, _ in imported() if name in STACK}


def test_the_version_has_one_source() -> None:
    setup = (REPOSITORY / "setup.py").read_text(encoding="utf-8")
    assert "version=VERSION" in setup
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", __version__)


def test_the_smoke_script_explains_itself_without_installing_anything() -> None:
    script = REPOSITORY / "run_scripts" / "smoke_cpu.sh"
    shown = subprocess.run(
        ["bash", str(script), "--help"], capture_output=True, text=True, timeout=HANG_S, check=True, env={}
    )
    assert shown.stdout.startswith("A tiny model learns")
    assert "setup" not in shown.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["--task"],
            "--task must be addition, lake, lake_agent, openai_agent, calculator, image, look, words or "
            "distill, got",
        ),
        (
            ["--task", "chess"],
            "--task must be addition, lake, lake_agent, openai_agent, calculator, image, look, words or "
            "distill, got 'chess'",
        ),
        (
            ["--model"],
            "--model must be dense or moe, qwen2.5-vl or qwen3-vl for look, smollm2 for words, got",
        ),
        (["--task", "addition", "--model", "sparse"], "smollm2 for words, got 'sparse'"),
    ],
)
def test_the_smoke_script_refuses_what_it_does_not_have(words: list[str], error: str) -> None:
    script = REPOSITORY / "run_scripts" / "smoke_cpu.sh"
    done = subprocess.run(
        ["bash", str(script), *words], capture_output=True, text=True, timeout=HANG_S, env={}
    )
    assert done.returncode == 2
    assert error in done.stderr


def test_setup_refuses_an_engine_that_it_does_not_have() -> None:
    script = REPOSITORY / "run_scripts" / "setup.sh"
    command = ["bash", str(script), "--engine", "vllm-0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 2
    releases = sorted(path.stem for path in (REPOSITORY / "run_scripts" / "engines").glob("*.txt"))
    assert f"--engine must be one of {' '.join(releases)}, got 'vllm-0.1'" in done.stderr


def test_setup_empties_no_environment_of_another_folder(tmp_path: Path) -> None:
    checkout, other = tmp_path / "checkout", tmp_path / "other"
    for name in ("run_scripts", "patches"):
        shutil.copytree(REPOSITORY / name, checkout / name)
    other.mkdir()
    (other / "kept").touch()
    (checkout / ".venv").mkdir()
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*namespace, "true"], capture_output=True).returncode
    ):
        pytest.skip("needs user namespaces")
    script = f"mount --bind {other} {checkout}/.venv && bash {checkout}/run_scripts/setup.sh"
    command = [*namespace, "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 1
    assert f"{checkout}/.venv is a link or a mount of another folder" in done.stderr
    assert (other / "kept").exists()


@pytest.mark.nightly
def test_setup_replaces_the_environment_that_it_runs_in(tmp_path: Path) -> None:
    """Its folder was moved, so that the environment has to be made again; it is activated."""
    checkout, linked = tmp_path / "checkout", tmp_path / "linked"
    for name in ("run_scripts", "patches"):
        shutil.copytree(REPOSITORY / name, checkout / name)
    linked.symlink_to(checkout)
    venv.create(checkout / ".venv", symlinks=True)
    stamps = checkout / ".cache" / "setup"
    stamps.mkdir(parents=True)
    (stamps / "make_venv").write_text(str(tmp_path / "before" / ".venv"))

    def step_1(folder: Path) -> str:
        """Return what the first step said; the second one fails, because no package can be found."""
        done = subprocess.run(
            ["bash", str(folder / "run_scripts" / "setup.sh")],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            env={
                "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}",
                "VIRTUAL_ENV": f"{folder}/.venv",
                "PIP_NO_INDEX": "1",
                "ASYNC_PIPELINE_INSTALLER": "pip",
            },
        )
        return next(line for line in done.stdout.splitlines() if line.startswith("[1/6]"))

    made = step_1(checkout)
    assert "failed" not in made and "up to date" not in made
    interpreter = checkout / ".venv" / "bin" / "python"
    home = subprocess.run(
        [interpreter, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True
    )
    assert home.stdout.strip() == str(checkout / ".venv")
    assert "up to date" in step_1(linked), "the same folder, reached by a link"


def test_the_virtual_environment_of_an_agent_is_made_once_for_its_requirements(tmp_path: Path) -> None:
    script, wanted = tmp_path / "run_scripts" / "agent_venv.sh", tmp_path / "some_agent.txt"
    script.parent.mkdir()
    for name in (script.name, "common.sh"):
        shutil.copy(REPOSITORY / "run_scripts" / name, script.parent)
    wanted.write_text("openai")
    # Stands in for python -m venv, and then for the interpreter that it makes.
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\n'
        'if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi\n'
    )
    python.chmod(0o700)

    def made(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "PYTHON": str(python)}
        command = ["bash", str(script), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=environment)

    first, second = (made(str(wanted)).stdout.strip() for _ in range(2))
    assert first == second and Path(first).is_relative_to(tmp_path / ".cache" / "agents" / "")
    assert [line.split()[1] for line in calls.read_text().splitlines()] == ["venv", "pip"]
    wanted.write_text("openai==1")
    assert made(str(wanted)).stdout.strip() not in ("", first)
    refused = made(str(tmp_path / "no_such.txt"))
    assert refused.returncode == 2 and "must be a file of requirements, got" in refused.stderr


def test_the_required_verl_is_the_pinned_one() -> None:
    lines = (PACKAGE / "REQUIRED_VERL.txt").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    pin = read_pin(REPOSITORY / "patches")
    assert fields["TAG"] == pin.tag and fields["GIT_SETUP"].endswith(f"git checkout {pin.tag}")
    assert fields["PIP_INSTALL"] == f"pip install verl=={pin.version}"
