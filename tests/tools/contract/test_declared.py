# SPDX-License-Identifier: Apache-2.0
"""The tables of engines: their grammar, and that they declare what the code takes from engines."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import ContractError
from recipe.async_pipeline.installed.engines import ENGINES
from recipe.async_pipeline.installed.verl import patches_dir
from recipe.async_pipeline.tools.contract import declared, engines
from recipe.async_pipeline.tools.contract.declared import PACKAGE, Alternative, Need
from recipe.async_pipeline.tools.contract.sources import OURS, Sources, imported
from tests import REPOSITORY
from tests.source_tree import MODULES, nodes_of
from tests.tools.contract.engine_objects import EngineObjects

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
ARGUMENTS: str = "vllm.core:Core | vllm.names:'*'"
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
        ("vllm.core", "'.flag'", ("vllm.core:'.flag'",)),
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
    file.write_text('FILES: dict = compute()\nARGUMENTS: str = ""\nUSES: dict = {}\n')
    with pytest.raises(ContractError, match="FILES, ARGUMENTS and USES"):
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
            assert undeclared(file) == [], f"add {file} to FILES of {engine}"


IN_AN_ENGINE: Mapping[str, str] = {
    "verl_bridge/rollout/vllm/worker.py": "vllm.v1.worker.worker_base:WorkerBase",
    "lab/bench/jobs/weight_updates/weight_sync_worker.py": "vllm.v1.worker.worker_base:WorkerBase",
    "verl_bridge/rollout/sglang/scheduler.py": "sglang.srt.managers.scheduler:Scheduler",
    "lab/bench/jobs/weight_updates/sglang_steps.py": "sglang.srt.managers.scheduler:Scheduler",
}
"""Files with classes that become part of a class of an engine: what they take from `self` is that class's."""

OF_PYTHON_AND_TORCH = {
    *("append", "get", "index", "items", "keys", "partition", "pop", "removeprefix", "removesuffix"),
    *("rpartition", "setdefault", "startswith", "strip", "values"),
    *("__module__", "__mro__", "__name__", "__qualname__"),
    *("done", "result", "set_exception", "set_result"),
    *("_buffers", "_modules", "_non_persistent_buffers_set", "_parameters"),
    *("get_submodule", "modules"),
    *("named_buffers", "named_modules", "named_parameters"),
    *("copy_", "data", "detach", "dim", "itemsize", "shape", "to", "transpose", "view"),
}
"""Members that this package takes from their objects where an engine's object could be."""

NOT_OF_AN_ENGINE: Mapping[str, set[str]] = {
    "lab/bench/jobs/weight_updates/sglang_steps.py": {"rank"},  # of torch's group
    "lab/gpu_kit/engine_check.py": {
        *("answer", "facts", "load", "salts", "stage", "versioned"),  # of `CheckedEngine`
        *("models", "reports", "tensors_proved", "wrong"),
    },
    "verl_bridge/rollout/served_parts.py": {"published", "replicas", "served"},  # of `FusedPart`
    "verl_bridge/rollout/sglang/calls.py": {"size", "send_pyobj"},  # of torch's group, of a socket
    "verl_bridge/rollout/sglang/lora.py": {"name"},  # of `TensorEntry`
    "verl_bridge/rollout/sglang/pictures.py": {"given_tokens", "new_tensor"},  # of this package, and of torch
    "verl_bridge/rollout/vllm/adapter.py": {
        "name",
        "_iter_all_models_with_config",
    },  # and of verl's extension
    "verl_bridge/rollout/vllm/engine.py": {"raw"},  # of `Part`
    "verl_bridge/rules/expert_backends.py": {"text_config", "model_type"},  # of `config.json`
    # verl's configuration and its arguments.
    "verl_bridge/rollout/sglang/server.py": {
        *("engine_kwargs", "max_model_len", "max_num_seqs", "sglang", "tensor_model_parallel_size"),
    },
    "verl_bridge/rollout/vllm/server.py": {"sampling_params", "tensor_model_parallel_size"},
}
"""What a file takes from objects of others where an engine's object could be."""

OWN = Sources(roots={OURS: PACKAGE})


def undeclared(file: str, sources: Sources = OWN) -> list[str]:
    """Return what a file takes from objects of engines and no table of its engines has, with the places."""
    known = declared_names(file) | derived_names(file) | OF_PYTHON_AND_TORCH
    known |= NOT_OF_AN_ENGINE.get(file, set())
    taken = EngineObjects(sources, declared.module_of(sources, file), file in IN_AN_ENGINE).accesses()
    return [f"{file}:{one.line} {one.name}" for one in taken if one.name not in known]


def declared_names(file: str) -> set[str]:
    """Return the names of each table that lists a file."""
    listing = [engine for engine in ENGINES if file in declared.table_of(engine).files]
    return {name for engine in listing for name in table_names(engine)}


def derived_names(file: str) -> set[str]:
    """Return the names that the shipped contract has for a file, most of them from its imports."""
    needs = (need for contract in engines.load(patches_dir()).values() for need in contract.needs)
    return {one.name for need in needs if file in need.used_by for one in need.alternatives}


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


FILES = sorted({file for engine in ENGINES for file in declared.table_of(engine).files})


@pytest.mark.parametrize("file", FILES)
def test_no_member_of_an_engines_object_is_undeclared(file: str) -> None:
    assert undeclared(file) == [], f"declare them in {declared.TABLES}, then run `bash run_scripts/fix.sh`"


@pytest.mark.parametrize(
    ("name", "code", "member"),
    [
        ("vllm/plugin.py", "core.scheduler.new_queue", "new_queue"),
        ("vllm/plugin.py", "core.load_snapshot()", "load_snapshot"),
        ("vllm/plugin.py", "[one.trainer for one in core.scheduler.requests]", "trainer"),
        ("vllm/plugin.py", "getattr(core, 'config')", "config"),
        ("vllm/plugin.py", "core.scheduler['version']", "version"),
        ("vllm/plugin.py", "first, *_ = zip(core.requests, ()); first.numel", "numel"),
        ("vllm/adapter.py", "core.lora_modules", "lora_modules"),
    ],
    ids=[
        "new",
        "this package's too",
        "verl's too",
        "a key's too",
        "an item",
        "torch's too",
        "of the other engine",
    ],
)
def test_an_undeclared_member_would_be_found(name: str, code: str, member: str) -> None:
    name = f"verl_bridge/rollout/{name}"
    text = (PACKAGE / name).read_text(encoding="utf-8") + f"\n\ndef new(core):\n    {code}\n"
    changed = Sources(
        roots={OURS: PACKAGE},
        read=lambda file: text.encode() if file == PACKAGE / name else file.read_bytes(),
    )
    assert undeclared(name, changed) == [f"{name}:{text.count(chr(10))} {member}"]


OF_OTHERS: Mapping[str, set[str]] = {
    "verl_bridge/rollout/served_layout.py": {
        *("q_proj", "k_proj", "v_proj", "qkv", "gate_proj", "up_proj", "q_a_proj", "kv_a_proj_with_mqa"),
        *("w1", "w2", "w3"),
    },
    # Not among the persistent buffers since vLLM 0.28.
    "verl_bridge/rollout/served_parts.py": {
        *("_expert_map", "expert_mask", "expert_global_to_physical", "expert_physical_to_global"),
        "expert_local_to_global",
    },
    "verl_bridge/rollout/sglang/arguments.py": {"cpu"},
    "verl_bridge/rollout/sglang/cpu_stubs.py": {  # this package's
        *("ipython", "megatron", "sgl_kernel", "tensors_between_processes"),
    },
    "verl_bridge/rollout/sglang/engine.py": {"json"},  # verl's
    "verl_bridge/rollout/sglang/lora.py": {  # peft's
        *("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "lora_bias"),
    },
    "verl_bridge/rollout/vllm/block_fp8.py": {"_scale_inv"},  # see BUILT_NAMES
    "verl_bridge/rollout/vllm/cpu_convolution.py": {"is_vnni", "is_weight_packed"},  # of other releases, one
    "verl_bridge/rollout/vllm/engine.py": {"drain", "freeze"},  # this package's
    "verl_bridge/rules/expert_backends.py": {"vllm", "sglang", "flashinfer"},  # engines, and a beginning
    "verl_bridge/rules/engine_memory.py": {"vllm", "sglang"},
    "verl_bridge/rules/sglang_rules.py": {
        *("num_experts", "num_local_experts", "n_routed_experts", "intermediate_size"),
        *("moe_intermediate_size", "shared_expert_intermediate_size"),
        *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
        "torchao_config",  # refused in any version: unknown to newer ones
    },
}
"""Words in constants that are no engine's: of checkpoints, or as the comment says."""


@pytest.mark.parametrize(
    "file", [file for file in FILES if file.startswith(("verl_bridge/rollout/", "verl_bridge/rules/"))]
)
def test_no_word_of_a_constant_is_undeclared(file: str) -> None:
    words = {
        f"{file}:{node.lineno} {node.value}"
        for statement in declared.module_of(OWN, file).tree.body
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None
        for node in ast.walk(statement.value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()
        if node.value not in declared_names(file) | derived_names(file) | OF_OTHERS.get(file, set())
    }
    assert words == set(), f"declare them in {declared.TABLES}, then run `bash run_scripts/fix.sh`"


@pytest.mark.parametrize("file", IN_AN_ENGINE)
def test_what_becomes_part_of_a_class_takes_what_is_declared_of_it(file: str) -> None:
    place, module = IN_AN_ENGINE[file], declared.module_of(OWN, file)
    own = {
        getattr(node, "name", ast.unparse(getattr(node, "target", node)))
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AnnAssign)
    }
    taken = {
        node.attr
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()")
    }
    of_class = table_names(place.partition(".")[0], place)
    assert taken - own - of_class == set(), f"declare them of {place}, then record it"


@pytest.mark.slow
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


@pytest.mark.parametrize("engine", ENGINES)
def test_each_declaration_can_be_violated(engine: str) -> None:
    found = [
        text
        for by_class in declared.table_of(engine).uses.values()
        for members in by_class.values()
        for text in members
        if any(f"!{one}" in text.split(" | ") for one in text.split(" | "))
    ]
    assert found == [], f"drop them from {declared.TABLES.format(engine)}"


BUILT_NAMES = {"A_buffer", "B_buffer", "A_buffer_qkv", "B_buffer_qkv", "'weight_scale_inv'"}
"""`lora.py` and `block_fp8.py` put these names together."""


def test_the_shipped_contract_has_the_tables() -> None:
    contracts = engines.load(patches_dir())
    for engine in ENGINES:
        recorded = {one.name for need in contracts[engine].needs for one in need.alternatives}
        assert table_names(engine) <= recorded, "run `bash run_scripts/fix.sh`"
