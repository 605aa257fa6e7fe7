# SPDX-License-Identifier: Apache-2.0
"""Check the layers, that modules do not import each other, and that every shipped config parses."""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from recipe.async_pipeline import errors
from recipe.async_pipeline.config.keys.translation import resolve
from recipe.async_pipeline.config.knobs.schema import STRATEGY_LAG
from recipe.async_pipeline.config.paths import select
from recipe.async_pipeline.installed.verl import find_verl_root
from tests import REPOSITORY
from tests.source_tree import MODULES, OWN_NAME, PACKAGE, below, nodes_of, parse

CONFIGS = sorted(path.stem for path in (REPOSITORY / "configs").glob("*.yaml"))

STACK = {"verl", "ray", "transfer_queue", "vllm", "sglang"}
MAY_IMPORT_STACK = (
    "verl_bridge/",
    "lab/bench/jobs/",
    "lab/gpu_kit/engine_check.py",
    "lab/gpu_kit/seeded_loop.py",
    "lab/gpu_kit/verls_arguments.py",
    "lab/soak/flood.py",
    "lab/tasks/calculator_task/calculator_tool.py",
    "tools/cli/findings/node_calls.py",
)
READS_FILES_ONLY = ("installed/", "tools/contract/", "tools/patches/")
"""Must work on a verl that cannot be imported."""
DECIDES = ("core/", "stages/", "strategies/")
HEAVY = {"torch", "verl", "ray", "vllm", "sglang", "transformers"}

PERSONAL_PATH = re.compile(r"(?<![\w.$}~-])/(?:home|root|Users|work)/\w")


@cache
def imports(module: str) -> Sequence[str]:
    """Return absolute dotted names of everything that a module imports, anywhere in it."""
    return [name for name, _ in imports_in(module)]


def imports_in(module: str) -> Iterator[tuple[str, list[str]]]:
    """Yield what each statement imports, and the names that it takes from there."""
    package = [*OWN_NAME.split("."), *module.split("/")[:-1]]
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield ".".join([*base, *filter(None, [node.module])]), [alias.name for alias in node.names]


TESTS = sorted(path.relative_to(REPOSITORY) for path in (REPOSITORY / "tests").rglob("test_*.py"))


def test_no_test_module_imports_another() -> None:
    """What tests share is in tests/fakes and conftest.py: a moved test must not break its neighbours."""
    importing = re.compile(r"^\s*(?:from|import) tests(?:\.\w+)*\.test_", re.MULTILINE)
    assert [str(path) for path in TESTS if importing.search((REPOSITORY / path).read_text("utf-8"))] == []


# Layers.


def imported(modules: Iterable[str], forbidden: Callable[[str, str], bool]) -> list[str]:
    """Return `module: name` for each import for which `forbidden(module, name)`."""
    return [f"{m}: {name}" for m in modules for name in sorted(set(imports(m))) if forbidden(m, name)]


def top(name: str) -> str:
    return name.split(".")[0]


def test_only_the_bridge_imports_the_stack() -> None:
    others = [m for m in MODULES if not m.startswith(MAY_IMPORT_STACK)]
    assert imported(others, lambda module, name: top(name) in STACK) == []


def test_what_patches_verl_does_not_import_it() -> None:
    assert imported(below(*READS_FILES_ONLY), lambda module, name: top(name) in STACK | HEAVY) == []


def test_what_decides_imports_the_standard_library_and_itself() -> None:
    def forbidden(module: str, name: str) -> bool:
        allowed = (f"{OWN_NAME}.errors", f"{OWN_NAME}.core", f"{OWN_NAME}.{module.split('/')[0]}")
        return not name.startswith(allowed) and top(name) not in sys.stdlib_module_names

    assert imported(below(*DECIDES), forbidden) == []


GROUND = {"errors", "console", "redaction", "processes"}
LAYERS: Mapping[str, set[str]] = {
    "core": set(),
    "installed": set(),
    "diffusion": {"weight_sync"},
    "stages": {"core"},
    "strategies": {"core"},
    "observe": {"core"},
    "weight_sync": {"core"},
    "agents": {"core"},
    "gateway": {"core"},
    "config": {"agents", "core", "strategies"},
    "checkpoint": {"config", "observe"},
    "verl_bridge": {
        *("agents", "checkpoint", "config", "core", "diffusion", "gateway", "installed"),
        *("observe", "stages", "strategies", "weight_sync"),
    },
}
"""What each folder of a run may import; the table in docs/architecture.md. `cli` may import all of them."""
UPPER_STOREYS = ("tools", "lab")
"""What no run imports, from the lower to the upper storey."""
USES_A_TOOL = {"verl_bridge/launch/engine_contract.py": f"{OWN_NAME}.tools.contract"}
"""The one import of a tool by a run: a launch compares an engine whose files are not the tested ones."""


def test_layers_import_what_is_below_them() -> None:
    def forbidden(module: str, name: str) -> bool:
        folder = module.split("/")[0]
        allowed = GROUND | LAYERS[folder] | {folder}
        if not name.startswith(f"{OWN_NAME}.") or USES_A_TOOL.get(module) == name:
            return False
        return name.split(".")[2] not in allowed

    assert imported([m for m in MODULES if m.split("/")[0] in LAYERS], forbidden) == []


LAZY = {
    "agents/environment.py": "PIL",
    "agents/gym_environment.py": "gymnasium",
    "agents/frozen_lake.py": "gymnasium",
    "agents/open_env.py": "websockets",
}
"""Adapters that import an optional package when they are used."""


def is_foreign(name: str) -> bool:
    """Return whether an import is of another package, and not of the standard library."""
    return top(name) not in {"recipe", *sys.stdlib_module_names}


def test_agents_import_the_standard_library_and_what_they_adapt() -> None:
    foreign = imported(
        below("agents/"), lambda module, name: is_foreign(name) and top(name) != LAZY.get(module)
    )
    assert foreign == []


def test_diffusion_imports_libraries_of_models_when_it_uses_them() -> None:
    at_the_top = {
        f"{module}: {alias.name if isinstance(node, ast.Import) else node.module or ''}"
        for module in below("diffusion/")
        for node in parse(module).body
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0)
        for alias in node.names
    }
    assert [
        found for found in at_the_top if top(found.split(": ")[1]) not in {"torch", *sys.stdlib_module_names}
    ] == []


IMAGES = (
    "diffusion/",
    "lab/tasks/image_task/",
    "verl_bridge/rollout/diffusers/",
    "verl_bridge/workers/diffusion/",
)


def test_only_images_need_diffusers() -> None:
    others = [m for m in MODULES if not m.startswith(IMAGES)]
    assert imported(others, lambda module, name: top(name) == "diffusers") == []


SERVES = {
    **dict.fromkeys(("gateway/app.py", "gateway/task_routes.py", "gateway/task_routes.py"), {"starlette"}),
    "gateway/server.py": {"uvicorn"},
}
"""The modules that import the optional packages of the gateway, and only in the process that serves."""


def test_the_gateway_imports_the_standard_library_and_its_wire() -> None:
    foreign = imported(
        below("gateway/"),
        lambda module, name: is_foreign(name) and top(name) not in {"msgspec", *SERVES.get(module, ())},
    )
    assert foreign == []


def storey(folder: str) -> int:
    return 1 + UPPER_STOREYS.index(folder) if folder in UPPER_STOREYS else 0


def test_storeys_import_downwards_only() -> None:
    def forbidden(module: str, name: str) -> bool:
        if not name.startswith(f"{OWN_NAME}.") or USES_A_TOOL.get(module) == name:
            return False
        return storey(name.split(".")[2]) > storey(module.split("/")[0])

    assert imported(MODULES, forbidden) == []


def test_no_run_loads_a_tool_by_name() -> None:
    """Ray, vLLM and hydra import what a string names. Only the table of subcommands names tools."""
    above = tuple(f"{OWN_NAME}.{folder}" for folder in UPPER_STOREYS)
    named = {
        module
        for module in MODULES
        if not storey(module.split("/")[0])
        for node in nodes_of(module)
        if isinstance(node, ast.Constant) and str(node.value).startswith(above)
    }
    assert named == {"cli/main.py"}


def test_a_run_imports_its_one_tool_when_it_is_needed() -> None:
    for module, tool in USES_A_TOOL.items():
        assert tool in imports(module)
        at_the_top = [node for node in parse(module).body if isinstance(node, ast.ImportFrom)]
        assert at_the_top and not [node for node in at_the_top if "tools" in (node.module or "").split(".")]


@pytest.mark.skipif(find_spec("verl") is None, reason="a launch imports verl")
@pytest.mark.slow
def test_a_launch_loads_no_tool() -> None:
    code = f"import sys, {OWN_NAME}.verl_bridge.launch.prepare; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY
    )
    loaded = done.stdout.splitlines()[-1].split()
    above = tuple(f"{OWN_NAME}.{folder}" for folder in UPPER_STOREYS)
    assert f"{OWN_NAME}.installed.engines" in loaded
    assert [name for name in loaded if name.startswith(above)] == []


@cache
def imported_modules(module: str) -> frozenset[str]:
    """Return the modules of this package that a module imports, anywhere in it; `__init__.py` as itself."""
    dotted: set[str] = set()
    for base, taken in imports_in(module):
        names = {f"{base}.{name}" for name in taken}
        submodules = {name for name in names if file_of(name)}
        dotted |= submodules | ({base} if names - submodules or not names else set())
    return frozenset(filter(None, map(file_of, dotted))) - {module}


def file_of(dotted: str) -> str | None:
    """Return the file of one of this package's modules, or None if the name is not of one."""
    parts = (
        dotted.removeprefix(OWN_NAME).lstrip(".").replace(".", "/") if dotted.startswith(OWN_NAME) else "?"
    )
    files = (f"{parts}.py", f"{parts}/__init__.py".lstrip("/"))
    return next((file for file in files if file in MODULES), None)


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the strongly connected components with more than one node: Tarjan's algorithm."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_nodes: list[str] = []
    components = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        open_nodes.append(node)
        for other in edges.get(node, ()):
            if other not in order:
                visit(other)
            if other in open_nodes:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == order[node]:
            start = open_nodes.index(node)
            component = sorted(open_nodes[start:])
            del open_nodes[start:]
            if len(component) > 1:
                components.append(component)

    for node in edges:
        if node not in order:
            visit(node)
    return components


def test_no_modules_import_each_other() -> None:
    """Imports inside functions and those for types only count: who reads one file needs the others."""
    edges = {module: sorted(imported_modules(module)) for module in MODULES}
    assert edges["core/flow.py"] and edges["__init__.py"]
    assert circles(edges) == [], "move what both need into a module below them"


def test_a_circle_would_be_found() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": []}) == [["b", "c"]]
    assert circles({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_every_folder_has_a_layer_or_is_the_command_line() -> None:
    assert {m.split("/")[0] for m in MODULES if "/" in m} == {*LAYERS, "cli", *UPPER_STOREYS}


def test_a_relative_import_is_resolved() -> None:
    assert f"{OWN_NAME}.errors" in set(imports("core/stage.py"))
    assert f"{OWN_NAME}.core.channel" in set(imports("core/flow.py"))


OWN_PATH = re.compile(r"(?:pkg://)?(recipe\.async_pipeline(?:\.\w+)+)[:.]?")


def test_a_path_in_a_string_leads_to_something() -> None:
    """Ray, vLLM, hydra and verl import these by name, and only in a run."""
    named = [
        (module, found[1])
        for module in MODULES
        for node in nodes_of(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if (found := OWN_PATH.fullmatch(node.value))
    ]
    assert named
    assert [one for one in named if not exists(one[1].removeprefix(f"{OWN_NAME}."))] == []


def exists(dotted: str) -> bool:
    """Whether a module or package, or a name at the top of a module, is called so."""
    path = PACKAGE.joinpath(*dotted.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    parent = path.parent.with_suffix(".py")
    return parent.is_file() and path.name in top_names(parent.relative_to(PACKAGE).as_posix())


def top_names(module: str) -> set[str]:
    """Names that a module defines at its top."""
    names: set[str] = set()
    for node in parse(module).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names.update(target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def test_a_path_to_nothing_would_be_found() -> None:
    assert exists("core.flow") and exists("core") and exists("core.flow.AsyncTrainingFlow")
    assert not exists("core.flow.Other") and not exists("core.other") and not exists("core.graph.GRAPH.x")


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, {OWN_NAME}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.stdout.split() == []


def test_what_crosses_verls_loops_is_in_one_record() -> None:
    folders = ("verl_bridge/agent_loop/", "verl_bridge/rollout/")
    having = [
        module
        for module in below(*folders)
        for node in nodes_of(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ContextVar"
    ]
    assert having == ["verl_bridge/agent_loop/episodes/episode.py"], "add a field to Episode"


def test_every_error_has_our_root_and_a_standard_parent() -> None:
    own = [e for e in vars(errors).values() if isinstance(e, type) and e is not errors.AsyncPipelineError]
    assert own
    for error in own:
        assert issubclass(error, errors.AsyncPipelineError)
        standard = {b for b in error.__mro__ if vars(builtins).get(b.__name__) is b}
        assert standard - {Exception, BaseException, object}, f"{error.__name__} is no standard error"


def test_no_tracked_file_names_a_personal_path() -> None:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout, so nothing is tracked")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    found = [
        f"{name}:{number}"
        for name in filter(None, listed.stdout.split("\0"))
        for number, line in enumerate(text_lines(REPOSITORY / name), start=1)
        if PERSONAL_PATH.search(line) or str(REPOSITORY) + "/" in line
    ]
    assert found == []


def text_lines(path: Path) -> list[str]:
    """No lines of a file that is gone or is not text."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError):
        return []


@pytest.mark.parametrize("folder", ["home", "root", "Users", "work"])
def test_a_personal_path_would_be_found(folder: str) -> None:
    assert PERSONAL_PATH.search(f"see /{folder}/me/notes")
    assert not PERSONAL_PATH.search(f"see verl/{folder}/me or $ROOT/{folder}/me")


# Configs.


def composed(name: str, *overrides: str) -> dict[str, Any]:
    """A shipped config with verl's own below it, found as files: verl is not imported."""
    GlobalHydra.instance().clear()
    search = f"hydra.searchpath=[file://{find_verl_root() / 'verl' / 'trainer' / 'config'}]"
    with initialize_config_dir(config_dir=str(REPOSITORY / "configs"), version_base=None):
        config = compose(config_name=name, overrides=[search, "++async_pipeline=True", *overrides])
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))


@pytest.mark.skipif(find_spec("verl") is None, reason="composes with verl's config")
@pytest.mark.parametrize("name", CONFIGS)
def test_every_shipped_config_composes_and_resolves(name: str) -> None:
    raw = composed(name)
    translation = resolve(raw)
    assert translation.config.strategy in STRATEGY_LAG
    if name != "async_pipeline":
        assert select(raw, "actor_rollout_ref.rollout.name"), "verl's own config is below it"


@pytest.mark.skipif(find_spec("verl") is None, reason="composes with verl's config")
@pytest.mark.parametrize(
    "task", sorted(path.stem for path in (REPOSITORY / "configs" / "task").glob("*.yaml"))
)
def test_every_task_composes_and_resolves(task: str) -> None:
    raw = composed("smoke_cpu", f"+task={task}")
    translation = resolve(raw)
    agentic, loop = translation.config.agentic, "actor_rollout_ref.rollout.agent.default_agent_loop"
    if agentic.environment is not None:
        assert translation.verl[loop] == "environment"
    if agentic.agent is not None:
        assert translation.verl[loop] == "agent_session"
    rollout, data = raw["actor_rollout_ref"]["rollout"], raw["data"]
    assert data["max_prompt_length"] + data["max_response_length"] <= rollout["max_model_len"]
