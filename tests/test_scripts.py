# SPDX-License-Identifier: Apache-2.0
"""The scripts find their interpreter by one rule, print their header as help, and refuse unknown options."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import HANG_S, REPOSITORY

FOLDER = REPOSITORY / "run_scripts"
INSTALL = sorted(path.name for path in FOLDER.glob("install_*.sh"))
START = sorted(path.name for path in FOLDER.glob("*.sh") if path.name.startswith(("fsdp_", "megatron_")))
SOURCED = ("common.sh", "cpu_env.sh")
WITH_HEADER = sorted(path.name for path in FOLDER.glob("*.sh") if path.name not in (*START, *SOURCED))
VENVS = (".venv-gpu", ".venv")


class Checkout:
    """A folder with the run scripts, and interpreters that print their own name and do nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        for part in ("run_scripts", "patches"):
            shutil.copytree(REPOSITORY / part, self.folder / part)
        self.add("bin/python3")

    def add(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "ran {name} $*"\n', encoding="utf-8")
        path.chmod(0o700)
        return path

    def run(self, script: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ASYNC_PIPELINE_"))}
        return subprocess.run(
            ["bash", str(self.folder / "run_scripts" / script), *arguments],
            env=environment | {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"} | settings,
            cwd=self.folder.parent,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )

    def interpreter(self, script: str, *arguments: str, **settings: str) -> str:
        """Return the name of the interpreter that a script starts, relative to this folder."""
        done = self.run(script, *arguments, **settings)
        assert done.returncode == 0, done.stderr
        words = done.stdout.split()
        assert words[0] == "ran", done.stdout
        return words[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


RUNS = [
    ("verify_gpu.sh",),
    ("train.sh",),
    *((name,) for name in START),
    ("slurm.sh", "--explain", "fsdp_vllm_dense.sh"),
]
"""Scripts that start what an installation has installed."""


@pytest.mark.parametrize("words", RUNS, ids=lambda words: words[0])
def test_the_interpreter_is_the_one_of_the_installation_for_gpus(
    words: tuple[str, ...], checkout: Checkout
) -> None:
    assert checkout.interpreter(*words) == "bin/python3"
    checkout.add(".venv/bin/python")
    assert checkout.interpreter(*words) == ".venv/bin/python"
    checkout.add(".venv-gpu/bin/python")
    assert checkout.interpreter(*words) == ".venv-gpu/bin/python"
    chosen = str(checkout.add("mine/python"))
    assert checkout.interpreter(*words, ASYNC_PIPELINE_PYTHON=chosen) == "mine/python"


@pytest.mark.parametrize("words", [("--device", "cpu"), ("--device=cpu",)])
def test_on_a_cpu_the_locked_stack_goes_first(words: tuple[str, ...], checkout: Checkout) -> None:
    checkout.add(".venv-gpu/bin/python")
    assert checkout.interpreter("verify_gpu.sh", *words) == ".venv-gpu/bin/python"
    checkout.add(".venv/bin/python")
    assert checkout.interpreter("verify_gpu.sh", *words) == ".venv/bin/python"


def test_no_interpreter_is_one_line(checkout: Checkout) -> None:
    (checkout.folder / "bin" / "python3").unlink()
    for name in ("bash", "dirname", "sed"):
        (checkout.folder / "bin" / name).symlink_to(str(shutil.which(name)))
    done = checkout.run("train.sh", PATH=str(checkout.folder / "bin"))
    assert done.returncode == 2 and "no Python found; run setup.sh or one of install_*.sh" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("script", WITH_HEADER)
def test_help_is_the_header(script: str, option: str, checkout: Checkout) -> None:
    done = checkout.run(script, option)
    assert (done.returncode, done.stderr) == (0, "")
    shown = "install.sh" if script in INSTALL else script
    header = [line for line in (FOLDER / shown).read_text("utf-8").splitlines()[2:] if line.startswith("#")]
    lines = done.stdout.splitlines()
    assert lines[0] == header[0].removeprefix("# ")
    assert any("bash run_scripts/" in line for line in lines)
    assert not any(line.startswith(("SBATCH", "!", "SPDX", "shellcheck")) for line in lines)


@pytest.mark.parametrize("script", START)
def test_help_of_a_start_script_is_that_of_what_it_calls(script: str, checkout: Checkout) -> None:
    done = checkout.run(script, "--help")
    assert done.returncode == 0 and "bash run_scripts/train.sh [--explain]" in done.stdout


@pytest.mark.parametrize("script", ["setup.sh", "slurm.sh", "wheel.sh", *INSTALL])
def test_an_unknown_option_is_one_line(script: str, checkout: Checkout) -> None:
    done = checkout.run(script, "--unknown")
    assert done.returncode == 2 and "--unknown" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""


def test_slurm_needs_the_checkout_that_it_was_submitted_in(checkout: Checkout) -> None:
    done = checkout.run("slurm.sh", "fsdp_vllm_dense.sh", SLURM_SUBMIT_DIR="/nowhere")
    assert done.returncode == 2 and "submit it in the checkout; /nowhere has no run_scripts/" in done.stderr


@pytest.mark.parametrize("options", [["--explain", "--task", "lake"], ["--task", "lake", "--explain"]])
def test_options_of_the_smoke_run_come_in_any_order_but_before_overrides(
    options: list[str], checkout: Checkout
) -> None:
    given = {"ASYNC_PIPELINE_PYTHON": str(shutil.which("echo")), "ASYNC_PIPELINE_TASK": "made"}
    done = checkout.run("smoke_cpu.sh", *options, "trainer.save_freq=1", **given)
    assert done.returncode == 0 and " explain " in done.stdout
    assert done.stdout.endswith(" +task=lake trainer.save_freq=1\n")
    done = checkout.run("smoke_cpu.sh", "trainer.save_freq=1", *options, **given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"smoke_cpu.sh: {options[0]} must come before the hydra overrides\n"
