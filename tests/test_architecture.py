# SPDX-License-Identifier: Apache-2.0
"""Check the layers: allowed imports, a mirror test for each module, and that every shipped config
parses.
"""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from recipe.async_pipeline import errors
from recipe.async_pipeline.config.paths import select
from recipe.async_pipeline.config.schema import STRATEGY_LAG
from recipe.async_pipeline.config.translation import resolve
from recipe.async_pipeline.patching.verl_source import find_verl_root
from tests import REPOSITORY

PACKAGE = REPOSITORY / "recipe" / "async_pipeline"
OWN_NAME = "recipe.async_pipeline"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
CONFIGS = sorted(path.stem for path in (REPOSITORY / "configs").glob("*.yaml"))

STACK = {"verl", "ray", "transfer_queue", "vllm", "sglang"}
MAY_IMPORT_STACK = ("verl_bridge/", "lab/bench/jobs/")
READS_FILES_ONLY = ("contract/", "patching/")
"""Must work on a verl that cannot be imported."""
DECIDES = ("core/", "stages/", "strategies/")
HEAVY = {"torch", "verl", "ray", "vllm", "sglang", "transformers"}

WHOLE_JOB = "e2e/test_jobs.py"
LADDER = "e2e/test_ladder.py"
TESTED_ELSEWHERE: Mapping[str, str] = {
    # Parts of one reading of the config.
    "config/schema.py": "config/test_translation.py",
    "config/paths.py": "config/test_translation.py",
    "config/foreign_pools.py": "config/test_placement.py",
    "console.py": "cli/test_main.py",
    "contract/shapes.py": "contract/test_record.py",
    # A row of it, and how it is printed.
    "tools/cli/finding.py": "tools/cli/test_doctor.py",
    # Nothing to call: classes without a body, and a protocol.
    "errors.py": "test_architecture.py",
    "core/trainer_protocol.py": "core/test_flow.py",
    "core/flow_state.py": "core/test_resume.py",
    "weight_sync/consumer.py": "weight_sync/test_keeper.py",
    "weight_sync/answer.py": "weight_sync/test_versioned_engine.py",
    # Parts of every adapter, tested through a fake engine.
    "weight_sync/map_check.py": "weight_sync/test_engine_adapter.py",
    "weight_sync/recording_adapter.py": "weight_sync/test_engine_adapter.py",
    "weight_sync/ranks.py": "weight_sync/test_arena.py",
    "verl_bridge/agent_loop/episode.py": "verl_bridge/agent_loop/test_episode_attempts.py",
    "verl_bridge/plugin_state.py": "verl_bridge/test_plugin.py",
    "verl_bridge/reward/responses.py": "verl_bridge/reward/test_worker.py",
    # Has one of verl's managers make such actors as are tested there.
    "verl_bridge/reward/worker_manager.py": "verl_bridge/test_restartable_actors.py",
    # What every dialect does, and each of them, through the contract that all have.
    "gateway/wire.py": "gateway/test_dialects.py",
    "gateway/task_routes.py": "gateway/test_claims.py",
    "gateway/turns.py": "gateway/test_sessions.py",
    **dict.fromkeys(
        (f"gateway/dialects/{path.name}" for path in (PACKAGE / "gateway/dialects").glob("[!_]*.py")),
        "gateway/test_dialects.py",
    ),
    # Separate processes.
    "lab/bench/gateway_clients.py": "lab/bench/test_gateway.py",
    "agents/command_process.py": "agents/test_commands.py",
    # Constants of the table.
    **dict.fromkeys(
        (f"strategies/{name}.py" for name in ("on_policy", "one_step_off", "n_step_ahead", "fully_async")),
        "strategies/test_strategies.py",
    ),
    # Register classes with verl.
    "verl_bridge/trainer/registration.py": "verl_bridge/test_launch.py",
    "verl_bridge/trainer/strategy_trainers.py": "verl_bridge/test_launch.py",
    # Imported for what it imports.
    "verl_bridge/rollout/vllm/prefork_imports.py": "verl_bridge/rollout/vllm/test_prefork.py",
    # Live in processes of Ray and of vLLM, with models in them.
    "verl_bridge/trainer/pipeline_run.py": WHOLE_JOB,
    "verl_bridge/trainer/verl_trainer.py": WHOLE_JOB,
    "verl_bridge/trainer/startup.py": WHOLE_JOB,
    "verl_bridge/reward/batch_scoring.py": "e2e/test_pools.py",
    "lab/bench/jobs/agent_loop.py": "e2e/test_bench.py",
    "lab/bench/jobs/checkpoint.py": "e2e/test_bench.py",
    "lab/bench/jobs/control_plane.py": "e2e/test_bench.py",
    "lab/bench/jobs/control_plane_job.py": "e2e/test_bench.py",
    "lab/bench/jobs/job.py": "e2e/test_bench.py",
    "lab/bench/jobs/fully_async_job.py": "lab/bench/jobs/test_fully_async.py",
    "lab/bench/jobs/weight_sync.py": "e2e/test_bench.py",
    "lab/bench/jobs/weight_sync_job.py": "e2e/test_bench.py",
    "lab/bench/jobs/sglang_backend.py": "e2e/test_bench.py",
    "lab/bench/jobs/sglang_replicas.py": "e2e/test_bench.py",
    "lab/bench/jobs/weight_sync_worker.py": "e2e/test_bench.py",
    "lab/bench/jobs/probe.py": "e2e/test_bench.py",
    "weight_sync/keeper_state.py": "weight_sync/test_keeper.py",
    "weight_sync/standby_version.py": "weight_sync/test_standby_copy.py",
    "verl_bridge/rollout/vllm/replica.py": WHOLE_JOB,
    "verl_bridge/rollout/vllm/server.py": WHOLE_JOB,
    "verl_bridge/rollout/diffusers/fields.py": "verl_bridge/agent_loop/test_diffusion_loop.py",
    "verl_bridge/rollout/diffusers/rank.py": "e2e/test_images.py",
    "verl_bridge/rollout/diffusers/replica.py": "e2e/test_images.py",
    "verl_bridge/rollout/diffusers/server.py": "e2e/test_images.py",
    "verl_bridge/rollout/sglang/replica.py": "e2e/test_sglang.py",
    "verl_bridge/rollout/sglang/server.py": "e2e/test_sglang.py",
    "verl_bridge/rollout/sglang/scheduler.py": "e2e/test_engine.py",
    "verl_bridge/rollout/sglang/lora.py": "verl_bridge/rollout/sglang/test_adapter.py",
    "verl_bridge/rollout/sglang/layout.py": "verl_bridge/rollout/sglang/test_adapter.py",
    "verl_bridge/rollout/standalone_replica.py": "verl_bridge/test_lost_nodes.py",
    # Tables, which are compared with the code and with the engines.
    "verl_bridge/rollout/sglang/uses.py": "contract/test_declared.py",
    "verl_bridge/rollout/vllm/uses.py": "contract/test_declared.py",
    "verl_bridge/workers/training_worker.py": WHOLE_JOB,
    "verl_bridge/workers/log_prob_worker.py": "e2e/test_pools.py",
    # Change the process that imports them, which therefore is a separate one.
    "verl_bridge/workers/megatron/boot.py": "verl_bridge/workers/megatron/test_engine.py",
    "verl_bridge/workers/megatron/holes.py": "verl_bridge/workers/megatron/test_engine.py",
    "verl_bridge/workers/megatron/rotary.py": "verl_bridge/workers/megatron/test_engine.py",
    "verl_bridge/workers/megatron/shards.py": "verl_bridge/workers/megatron/test_engine.py",
    "verl_bridge/workers/megatron/spec.py": "verl_bridge/workers/megatron/test_engine.py",
    "verl_bridge/trainer/terminal.py": WHOLE_JOB,
}
"""Modules without a mirror, each with the test file (below tests/) that covers it."""

PERSONAL_PATH = re.compile(r"(?<![\w.$}~-])/(?:home|root|Users|work)/\w")


@cache
def parse(module: str) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text(encoding="utf-8"))


@cache
def nodes_of(module: str) -> Sequence[ast.AST]:
    return [*ast.walk(parse(module))]


@cache
def imports(module: str) -> Sequence[str]:
    """Return absolute dotted names of everything that a module imports, anywhere in it."""
    return [*imports_in(module)]


def imports_in(module: str) -> Iterator[str]:
    package = [*OWN_NAME.split("."), *module.split("/")[:-1]]
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield ".".join([*base, *filter(None, [node.module])])


def mirror_of(module: str) -> str:
    folder, _, name = module.rpartition("/")
    return f"{folder}/test_{name}" if folder else f"test_{name}"


# Tests mirror the tree.


def test_every_module_has_a_mirror_test() -> None:
    modules = [m for m in MODULES if not m.endswith(("__init__.py", "__main__.py"))]
    covering = {m: TESTED_ELSEWHERE.get(m, mirror_of(m)) for m in modules}
    missing = [m for m, test in covering.items() if not (REPOSITORY / "tests" / test).is_file()]
    assert missing == [], "no test; write tests/DIR/test_NAME.py"


def test_exceptions_are_still_needed() -> None:
    gone = [module for module in TESTED_ELSEWHERE if module not in MODULES]
    mirrored = [module for module in TESTED_ELSEWHERE if (REPOSITORY / "tests" / mirror_of(module)).exists()]
    assert (gone, mirrored) == ([], []), "the module is gone, or it has a mirror now: drop its line"


TESTS = sorted(path.relative_to(REPOSITORY) for path in (REPOSITORY / "tests").rglob("test_*.py"))


def test_no_test_module_imports_another() -> None:
    """What tests share is in tests/fakes and conftest.py: a moved test must not break its neighbours."""
    importing = re.compile(r"^\s*(?:from|import) tests(?:\.\w+)*\.test_", re.MULTILINE)
    assert [str(path) for path in TESTS if importing.search((REPOSITORY / path).read_text("utf-8"))] == []


# Layers.


def below(*folders: str) -> list[str]:
    """Return the modules in these folders, which end in a slash."""
    found = [m for m in MODULES if m.startswith(folders)]
    assert found
    return found


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


GROUND = {"errors", "console", "redaction", "processes", "signatures"}
LAYERS: Mapping[str, set[str]] = {
    "core": set(),
    "patching": set(),
    "contract": {"patching"},
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
        *("agents", "checkpoint", "config", "contract", "core", "diffusion", "gateway", "observe"),
        *("patching", "stages", "strategies", "weight_sync"),
    },
}
"""What each folder of a run may import; the table in docs/architecture.md. `cli` may import all of them."""
UPPER_STOREYS = ("tools", "lab")
"""What no run imports, from the lower to the upper storey."""


def test_layers_import_what_is_below_them() -> None:
    def forbidden(module: str, name: str) -> bool:
        folder = module.split("/")[0]
        allowed = GROUND | LAYERS[folder] | {folder}
        return name.startswith(f"{OWN_NAME}.") and name.split(".")[2] not in allowed

    assert imported([m for m in MODULES if m.split("/")[0] in LAYERS], forbidden) == []


LAZY = {
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
    "lab/tasks/image_",
    "verl_bridge/rollout/diffusers/",
    "verl_bridge/workers/diffusion_",
)


def test_only_images_need_diffusers() -> None:
    others = [m for m in MODULES if not m.startswith(IMAGES)]
    assert imported(others, lambda module, name: top(name) == "diffusers") == []


SERVES = {
    **dict.fromkeys(("gateway/app.py", "gateway/task_routes.py"), {"starlette"}),
    "gateway/server.py": {"uvicorn"},
}
"""The modules that import the optional packages of the gateway, and only in the process that serves."""


def test_the_gateway_imports_the_standard_library_and_its_wire() -> None:
    foreign = imported(
        below("gateway/"),
        lambda module, name: is_foreign(name) and top(name) not in {"msgspec", *SERVES.get(module, ())},
    )
    assert foreign == []


def test_storeys_import_downwards_only() -> None:
    def storey(folder: str) -> int:
        return 1 + UPPER_STOREYS.index(folder) if folder in UPPER_STOREYS else 0

    def forbidden(module: str, name: str) -> bool:
        return name.startswith(f"{OWN_NAME}.") and storey(name.split(".")[2]) > storey(module.split("/")[0])

    assert imported(MODULES, forbidden) == []


@cache
def imported_modules(module: str) -> frozenset[str]:
    """Return the modules of this package that a module imports, anywhere in it; `__init__.py` as itself."""
    package = [*OWN_NAME.split("."), *module.split("/")[:-1]]
    dotted: set[str] = set()
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            dotted |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(
                [*package[: len(package) - node.level + 1], *filter(None, [node.module])]
                if node.level
                else filter(None, [node.module])
            )
            names = {f"{base}.{alias.name}" for alias in node.names}
            submodules = {name for name in names if file_of(name)}
            dotted |= submodules | ({base} if names - submodules else set())
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


# Habits.


def types_of(module: str) -> Iterator[str]:
    """Yield the public classes and the aliases of types that a module defines at its top."""
    for node in parse(module).body:
        match node:
            case ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if not is_type_variable(value):
                if name != name.upper() or len(name) == 1:
                    yield name
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                yield name


def is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("TypeVar", "ParamSpec")


def test_a_type_name_stands_for_one_thing() -> None:
    """Who greps a name finds one definition."""
    defined: dict[str, list[str]] = {}
    for module in MODULES:
        for name in types_of(module):
            if name[0].isupper():
                defined.setdefault(name, []).append(module)
    assert {name: modules for name, modules in defined.items() if len(modules) > 1} == {}


def test_what_crosses_verls_loops_is_in_one_record() -> None:
    folders = ("verl_bridge/agent_loop/", "verl_bridge/rollout/")
    having = [
        module
        for module in below(*folders)
        for node in nodes_of(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ContextVar"
    ]
    assert having == ["verl_bridge/agent_loop/episode.py"], "add a field to Episode"


PRIVATE_ACCESSES = 60
"""Bound of the accesses to private names in tests; lower it when there are fewer."""
DOCUMENTED = {"_asdict", "_exit", "_replace"}
"""Public methods of every NamedTuple, and `os._exit`."""


def private_accesses(text: str, own: Collection[str]) -> list[str]:
    """Return each access to one of the private names `own`, except on the object itself."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in own
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        if ast.unparse(node.value) != "super()"
    ]


def private_names() -> set[str]:
    """Return the private names that this package defines, at the top of a module or on an object."""
    defined: set[str] = set()
    for module in MODULES:
        for node in nodes_of(module):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    defined.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    defined.add(name)
    return {name for name in defined if re.match(r"_[^_]", name)} - DOCUMENTED


def test_tests_leave_private_names_alone() -> None:
    """A test of behaviour survives a change of the implementation."""
    own = private_names()
    found = {
        str(path.relative_to(REPOSITORY)): count
        for path in sorted((REPOSITORY / "tests").rglob("*.py"))
        if (count := len(private_accesses(path.read_text(encoding="utf-8"), own)))
    }
    assert sum(found.values()) <= PRIVATE_ACCESSES, dict(sorted(found.items(), key=lambda one: -one[1]))


def test_an_access_to_a_private_name_would_be_found() -> None:
    text = "self._a; cls._a; super()._a; made._a; made._other; made.a._a.b"
    assert private_accesses(text, {"_a"}) == ["made._a", "made.a._a"]


def test_nothing_prints() -> None:
    printing = [
        module
        for module in MODULES
        for node in nodes_of(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printing == []


LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"


def test_every_module_says_its_licence_and_its_purpose() -> None:
    texts = {module: (PACKAGE / module).read_text(encoding="utf-8") for module in MODULES}
    assert [module for module, text in texts.items() if not text.startswith(LICENCE)] == []
    assert [module for module in MODULES if not ast.get_docstring(parse(module))] == []


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
