# SPDX-License-Identifier: Apache-2.0
"""The pinned verl fits; each edit of it is named, with the code that it breaks."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from recipe.async_pipeline.installed.verl import patches_dir
from recipe.async_pipeline.tools.contract.compare import ContractProblem, Subject, compare
from recipe.async_pipeline.tools.patches import series, verl_source

pytestmark = pytest.mark.slow

BASE = "verl/trainer/ppo/v1/trainer_base.py"
CLIENT = "verl/workers/rollout/llm_server.py"
CONFIG = "verl/trainer/config/_generated_ppo_trainer.yaml"
UTILS = "verl/trainer/ppo/utils.py"
LOSSES = "verl/trainer/ppo/core_algos.py"
PLATFORM = "verl/plugin/platform/platform_base.py"
PARSER = "verl/experimental/agent_loop/tool_parser.py"
EDITS: Sequence[tuple[str, str, str]] = (
    (BASE, r"\b_compute_old_log_prob\b", "_old_log_prob"),
    (CLIENT, r"def _release_server\(self, server_id[^)]*\)", "def _release_server(self)"),
    (UTILS, r"def need_critic\(", "def need_critic(*, new=0, "),
    (CONFIG, r"\n  v1:\n", "\n  v2:\n"),
    (PARSER, r"\bToolParser\b", "Parser"),
    (
        PLATFORM,
        r"    @abc.abstractmethod\n    def is_available",
        "    @abc.abstractmethod\n    def new(self): ...\n\\g<0>",
    ),
    (LOSSES, r"max\(batch_num_tokens, 1\)", "batch_num_tokens.clamp(1)"),
)
"""Of the pinned verl: file, pattern and replacement. No edit hides another."""


@pytest.fixture(scope="module")
def problems(pinned: Path, tmp_path_factory: pytest.TempPathFactory) -> list[ContractProblem]:
    """What a copy of the pinned verl lacks after all edits; one comparison takes seconds."""
    root = tmp_path_factory.mktemp("edited")
    shutil.copytree(pinned / "verl", root / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    for path, pattern, replacement in EDITS:
        file = root / path
        text, number = re.subn(pattern, replacement, file.read_text("utf-8"))
        assert number, f"{pattern} is not in {path}"
        file.write_text(text, "utf-8")
    return list(compare(root, patches_dir()).problems)


def of(problems: list[ContractProblem], part: str) -> ContractProblem:
    (problem,) = [problem for problem in problems if part in problem.what]
    return problem


def test_the_pinned_verl_is_clean(pinned: Path) -> None:
    found = compare(pinned, patches_dir())
    assert found.problems == ()
    assert found.verl == found.pin == verl_source.read_pin(patches_dir()).version
    checked = dict(found.checked)
    assert tuple(checked) == get_args(Subject)
    assert checked.pop("patches") == len(series.series_names(patches_dir()))
    assert min(checked.values()) > 8


def test_each_edit_is_one_problem(problems: list[ContractProblem]) -> None:
    assert len(problems) == len(EDITS), "also what is missing with its module or its class"


def test_a_renamed_method_is_named_with_its_users(problems: list[ContractProblem]) -> None:
    problem = of(problems, "_compute_old_log_prob")
    assert (problem.subject, problem.severity) == ("names", "breaks")
    assert problem.what == "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_old_log_prob"
    assert problem.detail.startswith("is missing; ") and "verl_bridge/trainer/" in problem.detail


def test_a_signature_that_our_code_does_not_fit_breaks(problems: list[ContractProblem]) -> None:
    problem = of(problems, "LLMServerClient._release_server")
    assert (problem.subject, problem.severity) == ("overrides", "breaks")
    assert re.search(r"verl_bridge/rollout/client\.py:\d+ passes 2 arguments", problem.detail)


def test_a_signature_that_our_code_still_fits_is_a_change(problems: list[ContractProblem]) -> None:
    problem = of(problems, "need_critic")
    assert (problem.subject, problem.severity) == ("names", "changed") or problem.severity == "breaks"


def test_a_missing_key_and_a_missing_class_are_reported_once(problems: list[ContractProblem]) -> None:
    key, missing = of(problems, "trainer.v1"), of(problems, "ToolParser")
    assert (key.subject, key.what) == ("config keys", "trainer.v1")
    assert missing.what == "verl.experimental.agent_loop.tool_parser:ToolParser"


def test_a_new_abstract_method_is_named(problems: list[ContractProblem]) -> None:
    problem = of(problems, "PlatformCPU")
    assert problem.what == "recipe.async_pipeline.verl_bridge.cpu.cpu_platform:PlatformCPU"
    assert problem.severity == "breaks" and "abstract methods new" in problem.detail


def test_a_patch_whose_lines_changed_is_named(problems: list[ContractProblem]) -> None:
    problem = of(problems, ".patch on ")
    assert problem.what == f"0007-all-masked-loss.patch on {LOSSES}"
    assert (problem.subject, problem.severity) == ("patches", "breaks")
