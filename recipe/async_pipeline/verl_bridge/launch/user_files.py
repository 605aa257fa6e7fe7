# SPDX-License-Identifier: Apache-2.0
"""Check the files of users before Ray starts: rewards, tools and agent loops, and names that these define.

Each worker would find the same faults after a minute. Files of tools import verl, which takes seconds, so
that they are read here, and only a reward function's file is executed, in another process.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import yaml

from ...config.checks.user_classes import find_class
from ...config.paths import OWN, hint, select
from ...errors import ConfigError
from ...installed.verl import find_verl_root
from ..process import user_modules
from ..process.user_modules import FILE, PACKAGE
from ..reward.executor import LISTS
from .data_files import InputFault, each
from .light_verl import registered_agent_loops, registered_reward_managers, registered_tool_parsers, suffices

ROLLOUT = "actor_rollout_ref.rollout"
TOOLS, FUNCTIONS = f"{ROLLOUT}.multi_turn.tool_config_path", f"{ROLLOUT}.multi_turn.function_tool_path"
FORMAT = f"{ROLLOUT}.multi_turn.format"
EXTERNAL = "actor_rollout_ref.model.external_lib"
BACKEND = f"{ROLLOUT}.checkpoint_engine.custom_backend_module"
LOOPS, LOOP = f"{ROLLOUT}.agent.agent_loop_config_path", f"{ROLLOUT}.agent.default_agent_loop"
TOOL_LOOP = "tool_agent"
OWN_LOOPS = ("agent_session", "environment", "diffusion")
"""Agent loops of this package."""
MANAGER, SOURCES = "reward.reward_manager", ("register", "importlib")
CALLBACK, ROUTER = "trainer.checkpoint_callback_class", f"{ROLLOUT}.router_config_path"
DATA_SET = "data.custom_cls"
REWARD = "reward.custom_reward_function"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
OF_A_MODEL = ("reward_router_address", "reward_model_tokenizer")
"""Arguments of a call, and more of one with a reward model."""
IMPORT_S = 60.0
"""Time for a reward function's file. A slower one is left to the workers."""
SLOW = f"it was not loaded within {IMPORT_S:.0f} s"
_LOAD = """
import importlib, inspect, os, runpy, sys, traceback
from pathlib import Path

loader, path, name, *given = sys.argv[1:]
try:
    if path.startswith("pkg://"):
        module = importlib.import_module(path.removeprefix("pkg://").replace("/", "."))
    else:
        module = runpy.run_path(loader)["module_of"](Path(path.removeprefix("file://")))
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{name} is no function, but {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{name} yields values; return the score")
    try:
        # Not of what a decorator wraps: it may pass more or other arguments.
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # code in C
        given = ()
    if given:
        signature.bind(**dict.fromkeys(given))
except BaseException as error:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    calls = traceback.extract_tb(error.__traceback__)
    lines = [call.lineno for call in calls if Path(call.filename).name == Path(path).name]
    sys.exit(f"{text}, in line {lines[-1]}" if lines else text or 1)
print()  # it may have ended none of its lines
print("async_pipeline has loaded it", flush=True)
os._exit(0)  # its threads may run on
"""
"""Loads as `FunctionLocation` does, and tries the arguments of a call if they are `given`. It does not import
this package, which takes longer than most files.
"""


def faults_of_user_files(config: Mapping[str, Any], *, images: bool = False) -> Iterator[InputFault]:
    """Yield what the workers of a run with this resolved config of verl could not load.

    `images`: its policy draws pictures, which this package scores without a reward manager of verl.
    """
    managed = not images and not select(config, EXTERNAL) and suffices()
    yield from each(
        _faults_of_reward(config, images=images),
        _faults_of_tools(config),
        _faults_of_functions(config),
        _faults_of_loops(config),
        _faults_of_data_set(config),
        _faults_of_library(config),
        _faults_of_hooks(config),
        _faults_of_manager(config) if managed else (),
    )


# The reward function.


def _faults_of_reward(config: Mapping[str, Any], *, images: bool) -> Iterator[InputFault]:
    path, name = select(config, f"{REWARD}.path"), str(select(config, f"{REWARD}.name"))
    if not path:
        return
    path = str(path)
    file = Path(path.removeprefix(FILE))
    if not path.startswith(PACKAGE) and not file.is_file():
        yield InputFault(
            f"{REWARD}.path must be an existing Python file or {PACKAGE}MODULE, got {path!r}; correct it",
            "" if file.exists() else f"{REWARD}.path={path}, which is not on this machine",
        )
        return
    if last := _failure(path, name, () if images else _arguments(config)):
        missing, unnamed = (
            last.startswith("ModuleNotFoundError"),
            last.startswith(("AttributeError", "KeyError")),
        )
        remedy = "correct path and name" if missing or unnamed else "correct the function"
        problem = f"{REWARD}: {name} of {path} cannot be used ({last[:300]}); {remedy}"
        slow = last == SLOW  # it may load a model, and be quicker elsewhere
        yield InputFault(
            "" if slow else problem,
            f"{REWARD}.path={path}: {last} on this machine" if missing or slow else "",
        )


def _arguments(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the arguments with which verl's reward managers call a function, or nothing for others."""
    if select(config, f"{MANAGER}.source") != "register":
        return ()
    lists = select(config, f"{OWN}.reward.batch")
    names = [LISTS[name] if lists else name for name in ARGUMENTS]
    names += OF_A_MODEL if select(config, "reward.reward_model.enable") else ()
    return (*names, *(select(config, f"{REWARD}.reward_kwargs") or {}))


def _failure(path: str, name: str, arguments: Iterable[str]) -> str:
    """Return why a function cannot be loaded or called with these arguments, or nothing."""
    command = [sys.executable, "-c", _LOAD, user_modules.__file__, path, name, *arguments]
    # Files, since a process that the module starts would hold pipes open.
    with (
        TemporaryFile("w+", errors="replace") as printed,
        TemporaryFile("w+", errors="replace") as complaints,
    ):
        try:
            status = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=complaints,
                timeout=IMPORT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return SLOW
        printed.seek(0)
        complaints.seek(0)
        if not status:
            loaded = "async_pipeline has loaded it" in printed.read().splitlines()
            return "" if loaded else "it ends its process"
        return (complaints.read().strip().splitlines() or [f"its process ended with {status}"])[-1]


# Tools.


def _faults_of_tools(config: Mapping[str, Any]) -> Iterator[InputFault]:
    """Check the file of tools, and the classes that it names."""
    listed = _documents(config, TOOLS)
    if listed is None or isinstance(listed, InputFault):
        yield from [] if listed is None else [listed]
        return
    tools = listed.get("tools") if isinstance(listed, Mapping) else listed
    if (
        not isinstance(listed, Mapping)
        or not isinstance(tools, list)
        or not all(isinstance(tool, Mapping) for tool in tools)
    ):
        yield InputFault(f"{TOOLS} must name a file with a list `tools`, got {tools!r}; see verl's examples")
        return
    for tool in tools:
        if not isinstance(tool.get("config"), Mapping) or tool["config"].get("type") != "native":
            yield InputFault(
                f"{TOOLS} must list tools with config.type=native, got {tool.get('config')!r}; correct it"
            )
        yield from _faults_of_class(TOOLS, str(tool.get("class_name")))


def _faults_of_functions(config: Mapping[str, Any]) -> Iterator[InputFault]:
    """Check that a file of functions is Python, and that its imports are there."""
    file = _resolved(config, FUNCTIONS)
    if not isinstance(file, Path):
        yield from [file] if isinstance(file, InputFault) else []
        return
    if isinstance(tree := _parsed(file, FUNCTIONS), InputFault):
        yield tree
        return
    there = {path.stem for path in file.parent.iterdir()}
    for name in dict.fromkeys(_imported(tree)):
        if name not in there and not _is_installed(name):
            yield InputFault(
                f"{FUNCTIONS} must import installed modules, got {name!r} in {str(file)!r}; install it",
                f"{FUNCTIONS}={file}, whose package {name} is not on this machine",
            )
    if "function_tool" not in ast.unparse(tree):
        yield InputFault(
            f"{FUNCTIONS} must define a function with @function_tool, got none in {str(file)!r}; add it"
        )


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the packages that a module imports when it is loaded."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # __main__ has no spec
        return True


# Agent loops.


def _faults_of_loops(config: Mapping[str, Any]) -> Iterator[InputFault]:
    """Check the file of agent loops, and names that verl and this file register."""
    listed = _documents(config, LOOPS)
    own = list[str]()
    if isinstance(listed, list) and all(isinstance(one, Mapping) for one in listed):
        own = [str(one.get("name")) for one in listed]
        for one in listed:
            yield from _faults_of_class(LOOPS, str(one.get("_target_")))
    elif listed is not None:
        if not isinstance(listed, InputFault):
            listed = InputFault(
                f"{LOOPS} must name a file with a list of agent loops, got {listed!r}; correct it"
            )
        yield listed
    if select(config, EXTERNAL) or not suffices():
        return  # others may register names
    loop, form = select(config, LOOP), select(config, FORMAT)
    loops = [*own, *sorted(registered_agent_loops()), *OWN_LOOPS]
    alike = hint(str(loop), loops)
    # A file that cannot be read may define any name; one that is nearly a known one is rather misspelled.
    if loop not in loops and (alike or not isinstance(listed, InputFault)):
        absent = isinstance(listed, InputFault) and listed.absent
        yield InputFault(
            f"{LOOP} must be one of {', '.join(loops)}, got {loop!r}{alike}; correct it, or "
            f"define it in {LOOPS}",
            f"{LOOP}={loop}, which {LOOPS} may define" if absent else "",
        )
    forms = sorted(registered_tool_parsers())
    alike = hint(str(form), forms)
    # A file of functions, or what it imports, may register another form.
    needs_one = not select(config, FUNCTIONS) and (loop == TOOL_LOOP or select(config, TOOLS))
    if form not in forms and (alike or needs_one):
        yield InputFault(f"{FORMAT} must be one of {', '.join(forms)}, got {form!r}{alike}; correct it")


# Data sets, hooks, libraries and reward managers.


def _faults_of_data_set(config: Mapping[str, Any]) -> Iterator[InputFault]:
    """Check the files that verl's data set reads, and the class of another one."""
    for key in ("data.tool_config_path", "data.function_tool_path"):  # without them, prompts seem shorter
        if isinstance(file := _resolved(config, key), InputFault):
            yield file
    yield from _faults_of_pair(config, f"{DATA_SET}.path", f"{DATA_SET}.name")


def _faults_of_hooks(config: Mapping[str, Any]) -> Iterator[InputFault]:
    """Check the class that is called after each checkpoint, and the file of verl's router."""
    if target := select(config, CALLBACK):
        yield from _faults_of_class(CALLBACK, str(target))
    listed = _documents(config, ROUTER)
    if isinstance(listed, InputFault):
        yield listed
    elif listed is not None and not (isinstance(listed, Mapping) and listed.get("router_class")):
        yield InputFault(f"{ROUTER} must name a file with a key router_class, got {listed!r}; add it")
    elif listed is not None:
        yield from _faults_of_class(ROUTER, str(listed["router_class"]))


def _faults_of_library(config: Mapping[str, Any]) -> Iterator[InputFault]:
    for key in (EXTERNAL, BACKEND):
        listed = select(config, key) or []
        for name in [listed] if isinstance(listed, str) else listed:
            if not _is_installed(str(name).partition(".")[0]):
                yield InputFault(
                    f"{key} must be an installed module, got {name!r}; install it, or correct PYTHONPATH",
                    f"{key}={name}, which is not on this machine",
                )


def _faults_of_manager(config: Mapping[str, Any]) -> Iterator[InputFault]:
    """Check the name of a reward manager that verl has, or the file of another one."""
    source, path = (select(config, f"{MANAGER}.{key}") for key in ("source", "module.path"))
    if source not in SOURCES or (source == "importlib" and not path):
        yield InputFault(
            f"{MANAGER}.source must be one of {', '.join(SOURCES)}, the latter with {MANAGER}.module.path, "
            f"got {source!r} and {path!r}; correct them"
        )
    elif source == "importlib":
        yield from _faults_of_pair(config, f"{MANAGER}.module.path", f"{MANAGER}.name")
    name, names = select(config, f"{MANAGER}.name"), sorted(registered_reward_managers())
    if select(config, f"{MANAGER}.source") == "register" and name not in names:
        remedy = "correct it, or set its source and module"
        if name == "batch":  # verl up to 0.8
            remedy = f"for a function of lists, set naive, {OWN}.reward.batch and {OWN}.reward.timeout_s"
        near = hint(str(name), names)
        yield InputFault(f"{MANAGER}.name must be one of {', '.join(names)}, got {name!r}{near}; {remedy}")


# Files.


def _resolved(config: Mapping[str, Any], key: str) -> Path | InputFault | None:
    """Return the file that a key names, as verl finds it, or None if it names none."""
    name = select(config, key)
    if name is None:
        return None
    places = [Path(str(name).removeprefix(FILE)), find_verl_root() / str(name)]
    if found := next((place for place in places if place.is_file()), None):
        return found
    home = "; write the home folder out" if str(name).startswith("~") else "; correct the path"
    return InputFault(
        f"{key} must name an existing file, got {name!r}{home}",
        f"{key}={name}, which is not on this machine",
    )


def _parsed(file: Path, key: str) -> ast.Module | InputFault:
    """Return the syntax tree of a file, or the fault of a key that names it."""
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        return InputFault(f"{key} must name a Python file, got {str(file)!r} ({error}); correct it")


def _faults_of_pair(config: Mapping[str, Any], path_key: str, name_key: str) -> Iterator[InputFault]:
    """Check that a key names a class of the Python file, or the module, of another key, if that is given."""
    path, name = select(config, path_key), select(config, name_key)
    if path is None:
        return
    file = None if str(path).startswith(PACKAGE) else _resolved(config, path_key)
    if isinstance(file, InputFault):
        yield file
    elif file is not None and isinstance(tree := _parsed(file, path_key), InputFault):
        yield tree
    elif name is None or (file is not None and not _has_word(file, str(name))):
        yield InputFault(f"{name_key} must be a class in {str(file or path)!r}, got {name!r}; correct it")


def _has_word(file: Path, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", file.read_text("utf-8", "replace")) is not None


def _documents(config: Mapping[str, Any], key: str) -> Any:
    """Return what a YAML file contains, its fault, or None if the key names none."""
    file = _resolved(config, key)
    if not isinstance(file, Path):
        return file
    try:
        return yaml.safe_load(file.read_bytes())
    except (OSError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:300]
        return InputFault(f"{key} must name a YAML file, got {str(file)!r} ({reason}); correct it")


def _faults_of_class(key: str, target: str) -> Iterator[InputFault]:
    """Check that a class `package.module.Class` is in its source."""
    module, _, name = target.rpartition(".")
    if module.partition(".")[0] == "verl":  # to find it would import verl
        stem = find_verl_root().joinpath(*module.split("."))
        files = [file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file()]
        if not any(_has_word(file, name) for file in files):
            yield InputFault(f"{key} names {target!r}, which verl does not have; correct it")
        return
    if not module:
        yield InputFault(f"{key} must name a class as package.module.Class, got {target!r}; correct it")
        return
    try:
        find_class(f"{module}:{name}", key, derived=False)
    except ConfigError as error:
        yield from (InputFault(problem.replace(f"{module}:{name}", target)) for problem in error.problems)
