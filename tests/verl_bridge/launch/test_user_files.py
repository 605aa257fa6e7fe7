# SPDX-License-Identifier: Apache-2.0
"""What the workers could not load of a user's files is one line each before Ray starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recipe.async_pipeline.config.paths import OWN, nested
from recipe.async_pipeline.verl_bridge.launch import light_verl
from recipe.async_pipeline.verl_bridge.launch.user_files import OWN_LOOPS, faults_of_user_files
from tests import FAKES
from tests.conftest import Load

ROLLOUT, REWARD = "actor_rollout_ref.rollout", "reward.custom_reward_function"
TOOLS, FUNCTIONS = f"{ROLLOUT}.multi_turn.tool_config_path", f"{ROLLOUT}.multi_turn.function_tool_path"
LOOPS, LOOP = f"{ROLLOUT}.agent.agent_loop_config_path", f"{ROLLOUT}.agent.default_agent_loop"
FORMAT, MANAGER = f"{ROLLOUT}.multi_turn.format", "reward.reward_manager.name"
GIVEN: dict[str, Any] = {
    LOOP: "single_turn_agent",
    FORMAT: "hermes",
    MANAGER: "naive",
    "reward.reward_manager.source": "register",
}
Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def file(name: str, text: str) -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return file


def problems(changes: dict[str, Any]) -> list[str]:
    return [fault.problem for fault in faults_of_user_files(nested({**GIVEN, **changes}))]


def test_a_run_without_files_has_no_fault() -> None:
    assert problems({}) == []


@pytest.mark.parametrize("key", [TOOLS, FUNCTIONS, LOOPS, f"{REWARD}.path"])
def test_a_missing_file_is_named_and_may_be_elsewhere(key: str) -> None:
    (fault,) = faults_of_user_files(nested({**GIVEN, key: "/no/such/file"}))
    assert re.match(rf"{key} must .*, got '/no/such/file'", fault.problem)
    assert fault.absent == f"{key}=/no/such/file, which is not on this machine"


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        (LOOP, "tool_agnet", "must be one of .*, got 'tool_agnet' .did you mean 'tool_agent'"),
        (MANAGER, "batch", "must be .*, set naive, trainer.v1.async_pipeline.reward.batch and .*.timeout_s"),
        (MANAGER, "naiv", "must be one of dapo, .*, got 'naiv' .did you mean 'naive'"),
    ],
)
def test_a_misspelled_name_is_refused_with_a_hint(key: str, value: str, line: str) -> None:
    (problem,) = problems({key: value})
    assert re.match(f"{key} {line}", problem)


def test_a_form_of_tool_calls_matters_to_loops_with_tools() -> None:
    assert problems({FORMAT: "brackets"}) == []
    assert len(problems({FORMAT: "hermez", LOOP: "tool_agnt"})) == 2
    (problem,) = problems({FORMAT: "hermez", LOOP: "tool_agent"})
    assert re.match(f"{FORMAT} must be one of .*, got 'hermez' .did you mean 'hermes'", problem)


def test_agent_loops_of_a_file_have_names_and_classes(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    module = write("my_loops.py", "class MyLoop:\n    pass\n")
    monkeypatch.syspath_prepend(str(Path(module).parent))
    file = write("loops.yaml", "- name: mine\n  _target_: my_loops.MyLoop\n")
    assert problems({LOOPS: file, LOOP: "mine"}) == []
    (problem,) = problems({LOOPS: file, LOOP: "mime"})
    assert problem.startswith(f"{LOOP} must be one of mine, ")
    file = write("loops.yaml", "- name: mine\n  _target_: my_loops.MyLop\n")
    (problem,) = problems({LOOPS: file, LOOP: "mine"})
    assert problem.startswith(f"{LOOPS} names 'my_loops.MyLop', which the module does not define")
    (problem,) = problems({LOOPS: write("loops.yaml", "name: mine\n")})
    assert problem.startswith(f"{LOOPS} must name a file with a list of agent loops, got ")


def test_a_misspelled_loop_is_named_together_with_the_file_of_loops(write: Write) -> None:
    missing, known = faults_of_user_files(nested({**GIVEN, LOOPS: "/no/file", LOOP: "tool_agnet"}))
    assert missing.problem.startswith(f"{LOOPS} must name an existing file")
    assert (
        known.problem.startswith(f"{LOOP} must be one of ") and "did you mean 'tool_agent'" in known.problem
    )
    assert known.absent == f"{LOOP}=tool_agnet, which {LOOPS} may define"
    (fault,) = faults_of_user_files(nested({**GIVEN, LOOPS: "/no/file", LOOP: "browser"}))
    assert fault.problem == missing.problem, "the file may define it"
    (problem, _) = problems({LOOPS: write("loops.yaml", "name: mine\n"), LOOP: "tool_agnet"})
    assert problem.startswith(f"{LOOPS} must name a file with a list of agent loops, got ")


def test_tools_of_a_file_have_types_and_classes(write: Write) -> None:
    def tool(name: str, kind: str) -> str:
        return write("tools.yaml", f"tools:\n  - class_name: {name}\n    config: {{type: {kind}}}\n")

    assert problems({TOOLS: tool("verl.tools.base_tool.BaseTool", "native")}) == []
    (problem,) = problems({TOOLS: tool("verl.tools.base_tol.BaseTool", "native")})
    assert problem == f"{TOOLS} names 'verl.tools.base_tol.BaseTool', which verl does not have; correct it"
    (problem,) = problems({TOOLS: tool("verl.tools.base_tool.BaseToool", "native")})
    assert problem == f"{TOOLS} names 'verl.tools.base_tool.BaseToool', which verl does not have; correct it"
    (problem,) = problems({TOOLS: tool("verl.tools.base_tool.BaseTool", "mcp")})
    assert problem.startswith(f"{TOOLS} must list tools with config.type=native, got ")
    (problem,) = problems({TOOLS: write("tools.yaml", "tools: [")})
    assert problem.startswith(f"{TOOLS} must name a YAML file, got ")
    (problem,) = problems({TOOLS: write("tools.yaml", "[1]")})
    assert problem.startswith(f"{TOOLS} must name a file with a list `tools`, got [1]")


def test_functions_of_a_file_are_tools_and_their_imports_exist(write: Write) -> None:
    write("my_units.py", "")
    head = "import json\nimport my_units\nfrom verl.tools.function_tool import function_tool\n"
    function = "@function_tool\ndef length(text: str) -> str:\n    return text\n"
    assert problems({FUNCTIONS: write("tools.py", head + function)}) == []
    given = {FUNCTIONS: write("tools.py", head + function), LOOP: "tool_agent"}
    assert problems({**given, FORMAT: "brackets"}) == [], "it may import a module that registers the form"
    (problem,) = problems({**given, FORMAT: "hermez"})
    assert "did you mean 'hermes'" in problem
    (problem,) = problems({FUNCTIONS: write("tools.py", f"import no_such_package\n{head}{function}")})
    assert problem.startswith(f"{FUNCTIONS} must import installed modules, got 'no_such_package' in ")
    (problem,) = problems({FUNCTIONS: write("tools.py", "def length(text): return text\n")})
    assert problem.startswith(f"{FUNCTIONS} must define a function with @function_tool, got none in ")
    (problem,) = problems({FUNCTIONS: write("tools.py", "def length(:\n")})
    assert problem.startswith(f"{FUNCTIONS} must name a Python file, got ")


@pytest.mark.parametrize("key", ["data.tool_config_path", "data.function_tool_path", "data.custom_cls.path"])
def test_the_data_set_reads_existing_files(key: str) -> None:
    (fault,) = faults_of_user_files(nested({**GIVEN, key: "/no/file"}))
    assert fault.problem == f"{key} must name an existing file, got '/no/file'; correct the path"
    assert fault.absent == f"{key}=/no/file, which is not on this machine"


def test_a_data_set_is_in_its_file(write: Write) -> None:
    given = {"data.custom_cls.path": write("rows.py", "class MyRows:\n    pass\n")}
    assert problems({**given, "data.custom_cls.name": "MyRows"}) == []
    for wrong in ({"data.custom_cls.name": "MyRow"}, {}, {"data.custom_cls.path": "pkg://rows"}):
        (problem,) = problems({**given, **wrong})
        assert problem.startswith("data.custom_cls.name must be a class in ")
    (problem,) = problems(
        {"data.custom_cls.path": write("rows.py", "class MyRows"), "data.custom_cls.name": "MyRows"}
    )
    assert problem.startswith("data.custom_cls.path must name a Python file, got ")


def test_a_callback_and_a_router_are_classes(write: Write) -> None:
    callback, router = "trainer.checkpoint_callback_class", "actor_rollout_ref.rollout.router_config_path"
    assert problems({callback: "json.decoder.JSONDecoder"}) == []
    (problem,) = problems({callback: "JSONDecoder"})
    assert problem.startswith(f"{callback} must name a class as package.module.Class, got 'JSONDecoder'")
    (problem,) = problems({callback: "json.decoder.Nothing"})
    assert problem.startswith(f"{callback} names 'json.decoder.Nothing'")
    assert problems({router: write("a.yaml", "router_class: json.decoder.JSONDecoder")}) == []
    (problem,) = problems({router: write("b.yaml", "class: json.decoder.JSONDecoder")})
    assert problem.startswith(f"{router} must name a file with a key router_class, got ")
    (problem,) = problems({router: write("c.yaml", "router_class: json.decoder.Nothing")})
    assert problem.startswith(f"{router} names 'json.decoder.Nothing'")


@pytest.mark.parametrize(
    "library",
    ["actor_rollout_ref.model.external_lib", f"{ROLLOUT}.checkpoint_engine.custom_backend_module"],
)
def test_an_external_library_is_installed(library: str) -> None:
    assert problems({library: ["json.decoder"]}) == []
    (fault,) = faults_of_user_files(nested({**GIVEN, library: "no_such_library.losses"}))
    assert fault.problem.startswith(f"{library} must be an installed module, got 'no_such_library.losses'")
    assert fault.absent == f"{library}=no_such_library.losses, which is not on this machine"


def test_another_reward_manager_has_a_module(write: Write) -> None:
    source, path = "reward.reward_manager.source", "reward.reward_manager.module.path"
    (problem,) = problems({source: "importlib"})
    assert problem.startswith(f"{source} must be one of register, importlib, the latter with {path}, got ")
    assert len(problems({source: "import"})) == 1
    (problem,) = problems({source: "importlib", path: "/no/manager.py"})
    assert problem.startswith(f"{path} must name an existing file")
    assert problems({source: "importlib", path: write("naive.py", "class naive: ...")}) == []
    (problem,) = problems({source: "importlib", path: write("manager.py", "class Mine: ...")})
    assert problem.startswith(f"{MANAGER} must be a class in ") and problem.endswith(
        "got 'naive'; correct it"
    )


def test_a_reward_function_is_loaded_with_its_neighbours(write: Write) -> None:
    assert (
        problems({f"{REWARD}.path": str(FAKES / "user_files" / "word_points.py"), f"{REWARD}.name": "points"})
        == []
    )
    named = {f"{REWARD}.name": "score"}
    for text, reason in (
        ("import os\nos._exit(3)\n", "its process ended with 3"),
        ("1 / 0\n", "division by zero"),
        ("other = 1\n", "has no attribute 'score'"),
    ):
        (problem,) = problems({**named, f"{REWARD}.path": write("score.py", text)})
        assert problem.startswith(f"{REWARD}: score of ") and reason in problem and "\n" not in problem
    file = write("score.py", "import no_such_package\n")
    (fault,) = faults_of_user_files(nested({**GIVEN, **named, f"{REWARD}.path": file}))
    assert fault.absent.startswith(f"{REWARD}.path={file}: ") and "no_such_package" in fault.absent


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("score = 3", "TypeError: score is no function, but 3"),
        ("def score(solution): return 1.0", "TypeError: missing a required argument: 'solution'"),
        ("\nraise ValueError('one\\ntwo')", "ValueError: one two, in line 2"),
        ("import sys; sys.exit(0)", "SystemExit: 0, in line 1"),
        ("import os; os._exit(0)", "it ends its process"),
        ("def score(**all): yield 1.0", "TypeError: score yields values; return the score"),
        ("async def score(**all): yield 1.0", "TypeError: score yields values; return the score"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused(write: Write, text: str, reason: str) -> None:
    (problem,) = problems({f"{REWARD}.name": "score", f"{REWARD}.path": write("score.py", text)})
    assert f" cannot be used ({reason}); " in problem


def test_a_reward_function_may_be_of_any_kind_that_takes_the_arguments(write: Write) -> None:
    kinds = """
import functools

def with_client(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function("client", *args, **kwargs)
    return call

@with_client
def decorated(client, data_source, solution_str, ground_truth, extra_info): return 1.0
async def later(data_source, solution_str, ground_truth, extra_info=None, *, strict): return 1.0
def many(data_sources, solution_strs, ground_truths, extra_infos): return [1.0]
def judged(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer
): return 1.0
"""
    file = {f"{REWARD}.path": write("kinds.py", kinds)}
    more: dict[str, dict[str, Any]] = {
        "decorated": {},
        "later": {f"{REWARD}.reward_kwargs": {"strict": True}},
        "many": {f"{OWN}.reward.batch": 4},
        "judged": {"reward.reward_model.enable": True},
    }
    for name, changes in more.items():
        assert problems({**file, f"{REWARD}.name": name, **changes}) == []
        assert len(problems({**file, f"{REWARD}.name": name})) == bool(changes)


def test_a_reward_file_may_start_threads_and_processes(write: Write) -> None:
    text = """
import subprocess, sys, threading
threading.Thread(target=threading.Event().wait).start()
subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
def score(**all): return 1.0
"""
    changes = {f"{REWARD}.name": "score", f"{REWARD}.path": write("score.py", text)}
    assert [*faults_of_user_files(nested({**GIVEN, **changes}))] == []


def test_a_folder_is_no_reward_function_on_any_machine(tmp_path: Path) -> None:
    (fault,) = faults_of_user_files(nested({**GIVEN, f"{REWARD}.path": str(tmp_path)}))
    assert fault.problem.startswith(f"{REWARD}.path must be an existing Python file") and not fault.absent


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [
        ("reward", "compute_score", ""),
        ("reward", "points", "has no attribute 'points'"),
        ("rewrad", "compute_score", "No module named 'recipe.async_pipeline.lab.tasks.rewrad'"),
    ],
)
def test_a_reward_function_of_this_package(module: str, name: str, reason: str) -> None:
    path = f"pkg://recipe.async_pipeline.lab.tasks.{module}"
    found = problems({f"{REWARD}.path": path, f"{REWARD}.name": name})
    assert [reason in problem for problem in found] == ([True] if reason else [])


@pytest.mark.real_engine
def test_names_are_verls(load: Load) -> None:
    loops = load("verl.experimental.agent_loop.agent_loop")._agent_loop_registry
    load("verl.experimental.agent_loop")
    verls = {name for name, entry in loops.items() if entry["_target_"].startswith("verl.")}
    assert verls == light_verl.registered_agent_loops()
    parser = load("verl.experimental.agent_loop.tool_parser").ToolParser
    # Also the ones that have a subclass in this package.
    verls = {
        name
        for name, kind in parser._registry.items()
        if any(one is not parser and one.__module__.startswith("verl.") for one in kind.__mro__)
    }
    assert verls == light_verl.registered_tool_parsers()
    managers: ModuleType = load("verl.experimental.reward_loop.reward_manager.registry")
    load("verl.experimental.reward_loop.reward_manager")
    verls = {name for name, cls in managers.REWARD_MANAGER.items() if cls.__module__.startswith("verl.")}
    assert verls - {"visual"} == light_verl.registered_reward_managers()
    ours = ("sessions.agent_session_loop", "episodes.environment_loop", "diffusion_loop")
    loops = (load(f"recipe.async_pipeline.verl_bridge.agent_loop.{name}") for name in ours)
    assert {loop.NAME for loop in loops} == {*OWN_LOOPS}
