# SPDX-License-Identifier: Apache-2.0
"""A file that Python can import is one that a run can load: in the workers, and where rewards have limits."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.async_pipeline.verl_bridge.reward.executor import FunctionLocation, Limits, RewardGuard
from tests import FAKES, HANG_S, REPOSITORY

FILE = FAKES / "user_files" / "word_points.py"
EXPECTED = {
    "dataclass": 9.0,
    "pydantic": 8.0,
    "neighbour": 7.0,
    "decorator": 9.0,
    "process": 7.0,
    "spawned": 7.0,
    "executor": 8.0,
    "spawning executor": 17.0,
}
TOOLS = '''
from my_units import UNIT
from verl.tools.function_tool import function_tool

@function_tool
def length(text: str) -> str:
    """Measure a text.

    Args:
        text: what is measured.
    """
    return f"{len(text)} {UNIT}"
'''
WORKER = """
import asyncio
import json
import sys

from verl.tools.tool_registry import load_all_tools
from verl.utils.import_utils import load_extern_object

if __name__ == "__main__":
    file, kinds, tools, broken = json.loads(sys.argv[1])
    points = load_extern_object(file, "points")
    later = load_extern_object("file://" + file, "points_later")
    found = {
        "points": {kind: points(kind) for kind in kinds},
        "later": asyncio.run(later("neighbour")),
        "tools": [tool.name for tool in load_all_tools(None, tools)],
    }
    try:
        load_extern_object(broken, "points")
    except RuntimeError as error:
        found["error"] = str(error)
    print(json.dumps(found))
"""


@pytest.mark.parametrize("kind", EXPECTED)
def test_it_scores_within_limits(kind: str) -> None:
    for name in ("points", "points_later") if kind == "neighbour" else ("points",):
        guard = RewardGuard(
            FunctionLocation(str(FILE), name, {}), Limits(timeout_s=HANG_S, attempts=1, concurrency=1)
        )
        try:
            assert asyncio.run(guard.score(solution_str=kind)) == EXPECTED[kind]
        finally:
            guard.close()


@pytest.mark.real_engine
def test_it_is_loaded_in_a_process_of_verl(tmp_path: Path) -> None:
    """As reward workers without limits and agent loop workers do."""
    (tmp_path / "my_units.py").write_text("UNIT = 'm'\n", encoding="utf-8")
    sources = {"worker": WORKER, "my_tools": TOOLS, "broken_points": "1 / 0\n"}
    files = {name: tmp_path / f"{name}.py" for name in sources}
    for name, source in sources.items():
        files[name].write_text(source, encoding="utf-8")
    given = [str(FILE), [*EXPECTED], str(files["my_tools"]), str(files["broken_points"])]
    done = subprocess.run(
        [sys.executable, str(files["worker"]), json.dumps(given)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "points": EXPECTED,
        "later": EXPECTED["neighbour"],
        "tools": ["length"],
        "error": f"{files['broken_points']} cannot be loaded: ZeroDivisionError: division by zero",
    }
