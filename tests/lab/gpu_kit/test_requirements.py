# SPDX-License-Identifier: Apache-2.0
"""With torch and the modules of ARENA alone, the steps without verl run; a missing module is no traceback.

In each process that a test starts, `sitecustomize` hides the other packages of this environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.async_pipeline.lab.gpu_kit.catalogue import ARENA, RUN, STEPS
from recipe.async_pipeline.lab.gpu_kit.steps import FAILED, NOT_RUN
from tests import HANG_S, REPOSITORY

OF_TORCH = {
    *("torchgen", "functorch", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy"),
    "typing_extensions",
}
"""What torch itself imports."""
HIDING = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        # Private modules are parts of installed ones, or of the installation itself.
        if top in sys.stdlib_module_names or top in {shown!r} or top.startswith("_"):
            return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hiding, sys.meta_path)
"""


def run_with(shown: set[str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where only some packages are installed."""
    (folder / "sitecustomize.py").write_text(HIDING.format(shown={"recipe", *shown}), encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": f"{folder}:{REPOSITORY}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def test_without_any_package_every_step_says_what_it_needs(tmp_path: Path) -> None:
    done = run_with(
        set(), tmp_path, *("recipe.async_pipeline", "verify-gpu", "--device", "cpu", "--out", str(tmp_path))
    )
    assert "Traceback" not in done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu_report.json").read_text(encoding="utf-8"))["steps"]
    environment, *others = rows
    assert environment["status"] == FAILED and any(
        one["name"] == "verl" and one["value"].startswith("fail: ") for one in environment["figures"]
    )
    assert [row["status"] for row in others] == [NOT_RUN] * (len(STEPS) - 1)
    needs = {row["name"]: row["detail"].removeprefix("needs ").split(", ") for row in others}
    assert needs["copies"] == needs["delivery"] == list(ARENA)
    assert "the report is" in done.stdout and not (tmp_path / "gpu_report.html").exists(), (
        "a page needs jinja2"
    )
    assert needs["job"] == list(RUN) and needs["megatron"] == [*RUN, "megatron.core"]


def test_a_command_that_needs_more_says_what(tmp_path: Path) -> None:
    done = run_with(set(), tmp_path, "recipe.async_pipeline", "explain")
    assert done.returncode == 2 and "it needs omegaconf, which is not installed" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("recipe.async_pipeline.lab.bench.arena", "--sizes", "0.01", "--versions", "1"),
        ("recipe.async_pipeline.lab.gpu_kit.delivery", "--ranks", "1"),
    ],
    ids=lambda command: command[0].rpartition(".")[2],
)
def test_the_steps_without_verl_need_no_more_than_they_say(command: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    written = tmp_path / "found.json"
    options = ("--device", "cpu", "--json", str(written))
    done = run_with({*ARENA, *OF_TORCH}, tmp_path, *command, *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(written.read_text(encoding="utf-8"))
