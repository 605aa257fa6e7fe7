# SPDX-License-Identifier: Apache-2.0
"""The pinned verl fits; each edit of it is named, with the code that it breaks."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from recipe.async_pipeline.contract.compare import SUBJECTS, TreeComparison, compare
from recipe.async_pipeline.patching import series, verl_source

pytestmark = pytest.mark.slow

BASE = "verl/trainer/ppo/v1/trainer_base.py"
CLIENT = "verl/workers/rollout/llm_server.py"
CONFIG = "verl/trainer/config/_generated_ppo_trainer.yaml"
Edited = Callable[..., TreeComparison]


@pytest.fixture(scope="module", autouse=True)
def one_parse() -> Iterator[None]:
    """Parse each version of a file once for all tests: their trees are the same but for an edit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ast, "parse", cache(ast.parse))
        yield


@pytest.fixture
def edited(pinned: Path, tmp_path: Path) -> Edited:
    """Return a function that compares a copy of the pinned verl after (file, pattern, replacement) edits."""

    def run(*edits: tuple[str, str, str]) -> TreeComparison:
        shutil.copytree(pinned / "verl", tmp_path / "verl", ignore=shutil.ignore_patterns("__pycache__"))
        for path, pattern, replacement in edits:
            file = tmp_path / path
            text, number = re.subn(pattern, replacement, file.read_text("utf-8"))
            assert number, f"{pattern} is not in {path}"
            file.write_text(text, "utf-8")
        return compare(tmp_path, series.patches_dir())

    return run


def test_the_pinned_verl_is_clean(pinned: Path) -> None:
    found = compare(pinned, series.patches_dir())
    assert found.problems == ()
    assert found.verl == found.pin == verl_source.read_pin(series.patches_dir()).version
    checked = dict(found.checked)
    assert tuple(checked) == SUBJECTS
    assert checked.pop("patches") == len(series.series_names(series.patches_dir()))
    assert min(checked.values()) > 8


def test_a_renamed_method_is_named_with_its_users(edited: Edited) -> None:
    (problem,) = edited((BASE, r"\b_compute_old_log_prob\b", "_old_log_prob")).problems
    assert problem.severity == "breaks" and problem.detail.startswith("is missing; ")
    assert problem.what == "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_old_log_prob"
    assert "verl_bridge/trainer/" in problem.detail


def test_a_signature_that_our_code_does_not_fit_breaks(edited: Edited) -> None:
    found = edited((CLIENT, r"def _release_server\(self, server_id[^)]*\)", "def _release_server(self)"))
    (problem,) = found.of("overrides")
    assert problem.severity == "breaks" and "LLMServerClient._release_server" in problem.what
    assert re.search(r"verl_bridge/rollout/client\.py:\d+ passes 2 arguments", problem.detail)


def test_a_signature_that_our_code_still_fits_is_a_change(edited: Edited) -> None:
    (problem,) = edited(
        ("verl/trainer/ppo/utils.py", r"def need_critic\(", "def need_critic(*, new=0, ")
    ).problems
    assert (problem.subject, problem.severity) == ("names", "changed") or problem.severity == "breaks"


def test_a_missing_key_and_a_missing_module_are_reported_once(edited: Edited) -> None:
    found = edited((CONFIG, r"\n  v1:\n", "\n  v2:\n"), (CLIENT, r"\bLLMServerClient\b", "Client"))
    assert [p.what for p in found.of("config keys")] == ["trainer.v1"]
    assert "verl.workers.rollout.llm_server:LLMServerClient" in [p.what for p in found.of("names")]
    assert not [p for p in found.problems if ".LLMServerClient._" in p.what or "LLMServerClient." in p.what]


def test_a_new_abstract_method_is_named(edited: Edited) -> None:
    path = "verl/plugin/platform/platform_base.py"
    found = edited(
        (
            path,
            r"    @abc.abstractmethod\n    def is_available",
            "    @abc.abstractmethod\n    def new(self): ...\n\\g<0>",
        )
    )
    (problem,) = found.problems
    assert problem.what == "recipe.async_pipeline.verl_bridge.cpu_platform:PlatformCPU"
    assert problem.severity == "breaks" and "abstract methods new" in problem.detail


def test_a_patch_whose_lines_changed_is_named(edited: Edited) -> None:
    file = "verl/trainer/ppo/core_algos.py"
    found = edited((file, r"max\(batch_num_tokens, 1\)", "batch_num_tokens.clamp(1)"))
    assert [(p.severity, p.what) for p in found.of("patches")] == [
        ("breaks", f"0007-all-masked-loss.patch on {file}")
    ]
