# SPDX-License-Identifier: Apache-2.0
"""The sizes of the storeys: each file counts where it belongs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import REPOSITORY, tracked_files
from tests.sizes import PARTS, lines_of, table


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("core/flow.py", ["run"]),
        ("cli/main.py", ["run"]),
        ("tools/plan/bound.py", ["tools"]),
        ("lab/bench/inputs/arms.py", ["lab"]),
        ("config/knobs/schema.py", ["run", "config, a part of run"]),
        ("verl_bridge/rules/megatron_rules.py", ["run", "config, a part of run"]),
        ("verl_bridge/rules/megatron.py", ["run", "config, a part of run"]),
        ("verl_bridge/rollout/router.py", ["run"]),
        ("tools/report/report.css", []),
    ],
)
def test_lines_count_where_the_file_belongs(tmp_path: Path, name: str, parts: list[str]) -> None:
    file = tmp_path / "recipe" / "async_pipeline" / name
    file.parent.mkdir(parents=True)
    file.write_text("a = 1\n\nb = 2\n")
    lines = lines_of(tmp_path, [f"recipe/async_pipeline/{name}"])
    assert {part: count for part, count in lines.items() if count} == dict.fromkeys(parts, 3)


def test_every_file_of_the_package_and_of_the_tests_is_in_a_storey() -> None:
    files = [n for n in tracked_files() if n.endswith(".py") and n.startswith(("recipe/", "tests/"))]
    storeys = [part for title, part in PARTS.items() if title != "config, a part of run"]
    assert [name for name in files if sum(part.has(name) for part in storeys) != 1] == []


def test_a_row_has_lines_target_and_difference() -> None:
    assert "lab                     12,943  11,500   +1,443" in table({"lab": 12_943})


def test_the_command_prints_every_part() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.sizes"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    assert all(title in done.stdout for title in PARTS)
