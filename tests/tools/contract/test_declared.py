# SPDX-License-Identifier: Apache-2.0
"""The tables of engines: their grammar, and that they declare what the code takes from engines."""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import re
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import ModuleType

import pytest
import torch

from recipe.async_pipeline.errors import ContractError
from recipe.async_pipeline.installed.engines import ENGINES
from recipe.async_pipeline.installed.patch_state import patches_dir
from recipe.async_pipeline.tools.contract import declared, engines
from recipe.async_pipeline.tools.contract.declared import PACKAGE, Alternative, Need
from recipe.async_pipeline.tools.contract.sources import (
    OURS,
    Definition,
    Module,
    Sources,
    imported,
    own_members,
)
from tests import REPOSITORY
from tests.source_tree import MODULES, nodes_of

Tree = Callable[[Mapping[str, str]], Sources]

ENGINE = """
class Core:
    def __init__(self):
        self.queue = []
    async def send(self, item): ...
class Other:
    size = 1
def helper(): ...
"""
USER = """
from vllm.core import helper
try:
    from vllm.core import Sometimes
except ImportError:
    Sometimes = None
def use(core):
    core.queue, core.tp.size
    core.send(1)
    getattr(core, "flag")
    Sometimes()
"""
TABLE = """
from collections.abc import Mapping
FILES: Mapping[str, str] = {{"verl_bridge/use.py": "generation", "verl_bridge/more.py": "pause"}}
USES: Mapping[str, object] = {uses}
"""


@pytest.fixture
def needs_of(tmp_path: Path) -> Callable[[object], list[Need]]:
    """Return a function that derives the needs of a small package on a small vLLM from its table."""

    def make(uses: object) -> list[Need]:
        files = {
            "vllm/__init__.py": "",
            "vllm/core.py": ENGINE,
            "pkg/verl_bridge/use.py": USER,
            "pkg/verl_bridge/more.py": "def more(core):\n    core.queue\n",
            f"pkg/{declared.TABLES.format('vllm')}": TABLE.format(uses=uses),
        }
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text, encoding="utf-8")
        return declared.needs_of(declared.sources_of("vllm", tmp_path / "vllm", tmp_path / "pkg"))

    return make


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("vllm.core:Core", "queue", ("vllm.core:Core.queue",)),
        ("vllm.core", "helper", ("vllm.core:helper",)),
        ("vllm.core", "'flag'", ("vllm.core:'flag'",)),
        ("vllm.core:Core", "!flag", ("!vllm.core:Core.flag",)),
        ("vllm.core:Core", "send | async send", ("vllm.core:Core.send", "async vllm.core:Core.send")),
        ("vllm.core:Core", "size | vllm.core:Other.size", ("vllm.core:Core.size", "vllm.core:Other.size")),
        (
            "vllm.core:Core | vllm.names:'*'",
            "queue",
            ("vllm.core:Core.queue", "vllm.names:'queue'"),
        ),
    ],
)
def test_the_grammar_of_a_table(
    needs_of: Callable[[object], list[Need]], key: str, text: str, expected: tuple[str, ...]
) -> None:
    found = [need for need in needs_of({"pause": {key: (text,)}}) if need.breaks == "pause"]
    assert [tuple(map(str, need.alternatives)) for need in found] == [expected]
    assert [Alternative.of(str(one)) for one in found[0].alternatives] == list(found[0].alternatives)


def test_imports_are_needed_unless_the_code_does_without(
    needs_of: Callable[[object], list[Need]],
) -> None:
    found = {str(need.alternatives[0]): need for need in needs_of({})}
    assert set(found) == {"vllm.core:helper"}, "Sometimes is imported in `try`"
    assert found["vllm.core:helper"].breaks == "generation"
    assert found["vllm.core:helper"].used_by == ("verl_bridge/use.py",)


def test_a_declared_name_replaces_the_import_of_it(needs_of: Callable[[object], list[Need]]) -> None:
    (need,) = needs_of({"start on a CPU": {"vllm.core": ("helper | !helper",)}})
    assert need.breaks == "start on a CPU" and need.cpu_only


def test_a_member_belongs_to_the_files_that_name_it(needs_of: Callable[[object], list[Need]]) -> None:
    uses = {
        "pause": {"vllm.core:Core": ("queue", "!unknown")},
        "other": {"vllm.core:Core": ("queue",)},
    }
    users = {(need.breaks, str(need.alternatives[0])): need.used_by for need in needs_of(uses)}
    assert users["pause", "vllm.core:Core.queue"] == ("verl_bridge/more.py",), "the file whose pause breaks"
    assert users["other", "vllm.core:Core.queue"] == ("verl_bridge/more.py", "verl_bridge/use.py")
    assert users["pause", "!vllm.core:Core.unknown"] == ("verl_bridge/more.py",), "no file names it"


def test_a_table_of_other_values_is_refused(tmp_path: Path) -> None:
    file = tmp_path / declared.TABLES.format("vllm")
    file.parent.mkdir(parents=True)
    file.write_text("FILES: dict = compute()\nUSES: dict = {}\n")
    with pytest.raises(ContractError, match="FILES and USES"):
        declared.table_of("vllm", tmp_path)


# The package's own tables.


@pytest.mark.slow
def test_every_file_of_an_engine_is_in_its_table() -> None:
    for engine in ENGINES:
        folder = PACKAGE / "verl_bridge" / "rollout" / engine
        own = {path.relative_to(PACKAGE).as_posix() for path in folder.glob("*.py")}
        importing = {
            module
            for module in MODULES
            for node in nodes_of(module)
            if any(bound.module.split(".")[0] == engine for _, bound in imported(node, "recipe"))
        }
        files = set(declared.table_of(engine).files)
        assert importing <= files, f"{engine}: add the files to FILES, with what breaks without their imports"
        missing = own - files - {f"{folder.relative_to(PACKAGE).as_posix()}/__init__.py"}
        for file in missing:
            assert undeclared(file, engine) == set(), f"add {file} to FILES of {engine}"


NOT_OF_AN_ENGINE: Mapping[str, set[str]] = {
    # verl's: members of its server, of its worker extension and of its config.
    "verl_bridge/rollout/vllm/adapter.py": {"_iter_all_models_with_config"},
    "verl_bridge/rollout/vllm/server.py": {"engine"},
    "verl_bridge/rollout/sglang/server.py": {
        *("engine_kwargs", "lora_as_adapter", "max_model_len", "max_num_seqs", "tokenizer_manager"),
        "call",  # of this package's calls to the scheduler
    },
    "verl_bridge/rules/sglang_rules.py": {
        *("actor_rollout_ref", "expert_parallel_size", "path", "rollout", "target_modules"),
    },
    # Arguments of the command, Python's and torch's modules.
    "lab/gpu_kit/engine_check.py": {"engine", "models", "ranks"},
    "verl_bridge/rollout/vllm/facts.py": {"__qualname__"},
}
"""Members of run-time objects that are no engine's."""

KNOWN = {
    name
    for owner in (
        *(torch, torch.Tensor, torch.nn.Module()),
        *(dict, list, str, bytes, set, tuple, int, BaseException, ModuleType, ModuleSpec("x", None)),
        *(Path, argparse.ArgumentParser, asyncio.AbstractEventLoop, asyncio.Event, asyncio.Future),
        *(torch.distributed.ProcessGroup, SpawnProcess),
        type("NamedTuple", (), {"_replace": None, "exec_module": None}),
    )
    for name in dir(owner)
}
"""Members of Python's and torch's objects."""


def undeclared(file: str, engine: str) -> set[str]:
    """Return the members that a file takes from objects and that no table, no class of this package and no
    class of Python or torch has; of a declared member, that no table and no class of Python or torch has.
    """
    module = OWN.module(f"{OURS}.{file.removesuffix('.py').replace('/', '.')}")
    assert module is not None
    modules = {name for node in ast.walk(module.tree) for name, _ in imported(node, "recipe")}
    taken = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and root_of(node) not in modules:
            taken.add(node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            taken |= {str(name.value)} if isinstance(name, ast.Constant) else set()
    verl = {name for place in VERL["shapes"] for name in place.rpartition(":")[2].split(".")}
    keys = {part for paths in VERL["keys"].values() for path in paths for part in path.split(".")}
    own, names = members_of(module), declared_names(file)
    below = {
        node.attr
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
        if node.value.attr in names - own and root_of(node) not in modules
    }
    known = names | KNOWN | NOT_OF_AN_ENGINE.get(file, set())
    return (taken - own - verl - keys - known) | (below - known)


def root_of(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def members_of(module: Module) -> set[str]:
    """Return the names and the members of a module and of what it imports of this package."""
    found: set[str] = set()
    names = [module.name]
    for node in ast.walk(module.tree):
        for _, bound in imported(node, module.name.rpartition(".")[0]):
            names += [bound.module, f"{bound.module}.{bound.name}"]
    for name in names:
        one = OWN.module(name)
        for inner in () if one is None else ast.walk(one.tree):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(inner.name)
            if isinstance(inner, ast.ClassDef):
                assert one is not None
                owner = Definition(kind="class", module=one, name=inner.name, node=inner)
                for ancestor in OWN.ancestors(owner):
                    found |= set(own_members(ancestor))
        found |= set() if one is None else set(one.names)
    return found


def declared_names(file: str) -> set[str]:
    """Return the names of each table that lists a file."""
    listing = [engine for engine in ENGINES if file in declared.table_of(engine).files]
    return {name for engine in listing for name in table_names(engine)}


def table_names(engine: str, place: str | None = None) -> set[str]:
    """Return the names that the table of an engine declares, or declares of one place."""
    return {
        Alternative.of(text).name
        for by_class in declared.table_of(engine).uses.values()
        for key, members in by_class.items()
        if place in (None, key)
        for member in members
        for text in member.split(" | ")
    }


OWN = Sources(roots={OURS: PACKAGE})
VERL = json.loads((patches_dir() / "contract.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("engine", "file"), [(engine, file) for engine in ENGINES for file in declared.table_of(engine).files]
)
def test_no_member_of_an_engines_object_is_undeclared(engine: str, file: str) -> None:
    assert undeclared(file, engine) == set(), (
        f"declare them in {declared.TABLES.format(engine)}, then record the contract"
    )


@pytest.mark.parametrize(
    ("engine", "name", "code", "member"),
    [
        ("vllm", "plugin.py", "core.scheduler.new_queue", "new_queue"),
        ("vllm", "plugin.py", "core.scheduler.load_snapshot", "load_snapshot"),
        ("vllm", "adapter.py", "core.lora_modules", "lora_modules"),
    ],
    ids=["new", "a name of this package too", "a name of the other engine"],
)
def test_an_undeclared_member_would_be_found(
    monkeypatch: pytest.MonkeyPatch, engine: str, name: str, code: str, member: str
) -> None:
    name = f"verl_bridge/rollout/{engine}/{name}"
    text = (PACKAGE / name).read_text(encoding="utf-8") + f"\n\ndef new(core):\n    {code}\n"
    changed = Sources(
        roots={OURS: PACKAGE},
        read=lambda file: text.encode() if file == PACKAGE / name else file.read_bytes(),
    )
    monkeypatch.setitem(globals(), "OWN", changed)
    assert undeclared(name, engine) == {member}


IN_AN_ENGINE: Mapping[str, str] = {
    "verl_bridge/rollout/vllm/worker.py": "vllm.v1.worker.worker_base:WorkerBase",
    "lab/bench/jobs/weight_updates/weight_sync_worker.py": "vllm.v1.worker.worker_base:WorkerBase",
    "verl_bridge/rollout/sglang/scheduler.py": "sglang.srt.managers.scheduler:Scheduler",
    "lab/bench/jobs/weight_updates/sglang_steps.py": "sglang.srt.managers.scheduler:Scheduler",
}
"""Files with classes that become part of a class of an engine: what they take from `self` is that class's."""


@pytest.mark.parametrize("file", IN_AN_ENGINE)
def test_what_becomes_part_of_a_class_takes_what_is_declared_of_it(file: str) -> None:
    place, module = IN_AN_ENGINE[file], OWN.module(f"{OURS}.{file.removesuffix('.py').replace('/', '.')}")
    assert module is not None
    of_class = table_names(place.partition(".")[0], place)
    taken = {
        node.attr
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()")
    }
    assert taken - members_of(module) - of_class == set(), f"declare them of {place}, then record it"


def test_names_outside_the_code_of_an_engine_are_declared() -> None:
    """Environment variables and groups of entry points have the engine's name in them."""
    variable = re.compile(r"(?:VLLM|SGLANG|SGL)_[A-Z_0-9]+")
    used = {
        node.value
        for module in MODULES
        for node in nodes_of(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and variable.fullmatch(node.value)
    }
    assert used | OUTSIDE <= {name for engine in ENGINES for name in table_names(engine)}


OUTSIDE = {
    str(group.value)
    for node in ast.walk(ast.parse((REPOSITORY / "setup.py").read_bytes()))
    if isinstance(node, ast.keyword) and node.arg == "entry_points" and isinstance(node.value, ast.Dict)
    for group in node.value.keys
    if isinstance(group, ast.Constant) and str(group.value).partition(".")[0] in ENGINES
}
"""Groups of entry points of an engine that `setup.py` names and the code does not."""


@pytest.mark.parametrize("engine", ENGINES)
def test_no_declaration_is_left_over(engine: str) -> None:
    sources = declared.sources_of(engine, Path("nowhere"))
    named = frozenset[str]().union(
        *(declared.named_in(declared.module_of(sources, file)) for file in sources.files or ())
    )
    table = declared.table_of(engine).uses
    unused = {
        text
        for by_class in table.values()
        for members in by_class.values()
        for text in members
        if not text.startswith("!") and not named & {Alternative.of(one).name for one in text.split(" | ")}
    }
    unused -= {*BUILT_NAMES, *(f"'{group}'" for group in OUTSIDE)}
    assert unused == set(), f"drop them from {declared.TABLES.format(engine)}"


BUILT_NAMES = {"A_buffer", "B_buffer", "A_buffer_qkv", "B_buffer_qkv"}
"""`lora.py` puts these names together."""


def test_the_shipped_contract_has_the_tables() -> None:
    contracts = engines.load(patches_dir())
    for engine in ENGINES:
        recorded = {one.name for need in contracts[engine].needs for one in need.alternatives}
        assert table_names(engine) <= recorded, "run `bash run_scripts/fix.sh`"
