# SPDX-License-Identifier: Apache-2.0
"""The contract with vLLM and SGLang: each name that is gone is found, what still fits is not reported."""

from __future__ import annotations

import ast
import dataclasses
import random
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import ContractError
from recipe.async_pipeline.installed.engines import ENGINES, FILE, EngineTree, files_id, installed
from recipe.async_pipeline.installed.verl import patches_dir
from recipe.async_pipeline.tools.contract import declared, engines
from recipe.async_pipeline.tools.contract.declared import Alternative, Need
from recipe.async_pipeline.tools.contract.engines import Difference, EngineContract
from recipe.async_pipeline.tools.contract.sources import OURS, ClassMember, Sources
from tests import REPOSITORY
from tests.fakes.engine_trees import tree_of

INSTALLED = {engine.name: engine for engine in installed()}
SHIPPED = engines.load(patches_dir())


@pytest.fixture(params=ENGINES)
def tested(request: pytest.FixtureRequest) -> EngineTree:
    """An installed engine of the tested release."""
    engine = INSTALLED.get(request.param)
    if engine is None or not SHIPPED[request.param].is_of(engine):
        pytest.skip(f"reads {request.param} {SHIPPED[request.param].version}, which is not installed")
    return engine


# The shipped contract.


@pytest.mark.slow
def test_the_shipped_contract_is_current(tested: EngineTree) -> None:
    remedy = "run `bash run_scripts/fix.sh`"
    assert engines.record(tested) == SHIPPED[tested.name], remedy


@pytest.mark.slow
def test_the_tested_release_fits_and_its_id_is_of_all_that_is_compared(tested: EngineTree) -> None:
    plain, read = declared.sources_of(tested.name, tested.folder), set[Path]()

    def noted(file: Path) -> bytes:
        read.add(file)
        return plain.read(file)

    found = engines.compare(tested, SHIPPED[tested.name], dataclasses.replace(plain, read=noted))
    assert found.differences == () and found.checked > 100
    theirs = {
        file.relative_to(tested.folder).as_posix() for file in read if file.is_relative_to(tested.folder)
    }
    assert theirs and theirs <= {*SHIPPED[tested.name].files}


def unnoticed(engine: EngineTree, needs: Sequence[Need], contract: EngineContract) -> list[Need]:
    """Rename what meets some needs where it is defined, or hide its module; return what goes unnoticed."""
    plain = declared.sources_of(engine.name, engine.folder)
    names: dict[str, set[str]] = defaultdict(set)
    hidden = set()
    for one in (one for need in needs for one in need.alternatives):
        shape, place = contract.shapes[str(one)], one.place.removesuffix(".__init__")
        if shape == "module":
            base = engine.folder.joinpath(*one.place.replace(":", ".").split(".")[1:])
            hidden |= {base.with_suffix(".py"), base / "__init__.py"}
        elif shape is not None:
            found = plain.at(place)
            owner = found.owner if isinstance(found, ClassMember) else found
            # What methods assign to `self` is defined wherever a class, a mixin or a field does so.
            assigned = isinstance(found, ClassMember) and isinstance(
                found.node, ast.Attribute | ast.AnnAssign
            )
            module = owner.module.name if owner is not None else place.partition(":")[0]
            name = place.rpartition(":")[2].rpartition(".")[2]
            names["" if assigned else module].add(name if one.name == "__init__" else one.name)
    renamed = {
        engine.folder.joinpath(*module.split(".")[1:], *tail).with_suffix(".py"): of_module
        for module, of_module in names.items()
        if module
        for tail in ((), ("__init__",))
    }

    def read(file: Path) -> bytes:
        text = file.read_text(encoding="utf-8")
        of_file = renamed.get(file, set()) | (names[""] if file.is_relative_to(engine.folder) else set())
        pattern = "|".join(sorted(of_file)) or "(?!)"
        return re.sub(rf"\b(?:{pattern})\b", r"\g<0>_renamed", text).encode()

    sources = dataclasses.replace(
        declared.sources_of(engine.name, engine.folder),
        read=read,
        exists=lambda file: file not in hidden and file.is_file(),
    )
    reported = [found.name for found in engines.compare(engine, contract, sources).differences]
    return [
        need
        for need in needs
        if not any(
            name == need.alternatives[0].place
            or name.startswith(f"{need.alternatives[0]} | ")
            or need.alternatives[0].place.startswith((f"{name}.", f"{name}:"))
            for name in reported
        )
    ]


def renamable(contract: EngineContract) -> list[Need]:
    """Return the needs that nothing but a name meets."""
    return [need for need in contract.needs if not any(one.absent for one in need.alternatives)]


@pytest.mark.slow
def test_twenty_names_that_are_missing_at_random_are_all_reported(tested: EngineTree) -> None:
    contract = SHIPPED[tested.name]
    assert unnoticed(tested, random.Random(42).sample(renamable(contract), 20), contract) == []


@pytest.mark.nightly
def test_each_name_alone_is_reported(tested: EngineTree) -> None:
    contract = SHIPPED[tested.name]
    for need in renamable(contract):
        alone = dataclasses.replace(contract, needs=(need,))
        assert unnoticed(tested, [need], alone) == []


@pytest.mark.parametrize(
    ("member", "now"),
    [
        ("resume_generation", "async def (self, *, tags=...)"),
        ("pause_generation", "async def (self, *, mode=..., clear_cache=..., new=...)"),
        ("generate", "async def (self, prompt, sampling_params, request_id=..., *, more=..., **kwargs)"),
        ("generate", "async def (self, prompt, params, request_id, *, more=..., **kwargs)"),
    ],
)
@pytest.mark.slow
def test_a_harmless_change_of_a_signature_is_no_difference(
    tested: EngineTree, member: str, now: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tested.name != "vllm":
        pytest.skip("changes members of vLLM's AsyncLLM")
    contract, place = SHIPPED["vllm"], f"vllm.v1.engine.async_llm:AsyncLLM.{member}"
    (need,) = [need for need in contract.needs if str(need.alternatives[0]) == place]
    other = dataclasses.replace(contract, needs=(need,))
    asked = Alternative.shape

    def shape(self: Alternative, sources: Sources) -> str | None:
        return now if self.place == place else asked(self, sources)

    monkeypatch.setattr(Alternative, "shape", shape)
    assert engines.compare(tested, other).differences == ()


def test_only_some_models_need_what_a_kind_of_layer_does() -> None:
    """Otherwise a change of one model's layers would refuse the engine to the runs of all others."""
    breaks = {need.breaks for contract in SHIPPED.values() for need in contract.needs}
    assert {one for one in breaks if one.startswith("proof of ")} <= {*engines.OF_MODELS}
    assert breaks >= {*engines.IN_SOME_RUNS}


# The trees of other versions.

COMPARED = re.findall(
    r"^\| (vLLM|SGLang) (\S+) \| (\d+) \| (\d+) \| (.*?) ?\|$",
    (REPOSITORY / "patches" / "README.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
"""Rows of the table for users: engine, version, things compared, differences, what breaks."""


@pytest.mark.nightly
@pytest.mark.parametrize("row", COMPARED, ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_table_of_other_versions_is_true(row: tuple[str, str, str, str, str]) -> None:
    name, version, checked, differences, breaks = row
    (engine,) = engines.unpacked(tree_of(name.lower(), version))
    found = engines.compare(engine, SHIPPED[engine.name])
    assert engine.version == version
    assert (found.checked, len(found.differences)) == (int(checked), int(differences))
    broken = sorted({one for difference in found.differences for one in difference.breaks})
    assert "; ".join(broken) == breaks


# Each kind of change, in a small engine.

ENGINE = """
class Base:
    def inherited(self): return 1
class Core(Base):
    kept: int
    def __init__(self):
        self.queue = []
    @property
    def size(self): return 1
    def send(self, item): ...
    def begin(self, item, more=None): ...
def helper(a): ...
TABLE = {"flag": 1}
def change(core):
    core.mark = core.flag, core.socket
"""
PROPERTY = """    @property
    def queue(self): ...
"""
USER = """
from vllm.core import Core, helper
def use(core):
    core.queue, core.kept, core.size, core.inherited, core.old_queue, "flag", core.mark, core.socket
    core.queue = []
    core.send(1)
    core.begin(1, more=2)
    helper(1)
"""
TABLE = """
from collections.abc import Mapping
FILES: Mapping[str, str] = {"verl_bridge/use.py": "generation"}
ARGUMENTS: str = "vllm.core:Core"
USES: Mapping[str, object] = {
    "pause": {
        "vllm.core:Core": ("queue | old_queue", "kept", "size", "begin", "inherited", "!rejects"),
        "vllm.core": ("'flag'", "'mark'", "'.socket'"),
    },
    "spans": {"vllm.core:Core": ("send | async send",)},
    "loads on a CPU": {"vllm.core:Core": ("kept",)},
}
"""
Changed = Callable[..., list[Difference]]


@pytest.fixture
def changed(tmp_path: Path) -> Changed:
    """Return a function that compares the small engine after (old, new) edits with the one before."""
    table = f"pkg/{declared.TABLES.format('vllm')}"
    for path, text in {"vllm/__init__.py": "", "pkg/verl_bridge/use.py": USER, table: TABLE}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    engine = EngineTree(name="vllm", folder=tmp_path / "vllm", version="1.0")
    core = engine.folder / "core.py"

    def sources() -> Sources:
        return declared.sources_of("vllm", engine.folder, tmp_path / "pkg")

    def run(*edits: tuple[str, str]) -> list[Difference]:
        core.write_text(ENGINE, encoding="utf-8")
        contract = engines.record(engine, sources())
        text = ENGINE
        for old, new in edits:
            assert old in text
            text = text.replace(old, new)
        core.write_text(text, encoding="utf-8")
        return list(engines.compare(engine, contract, sources()).differences)

    return run


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("def send", "async def send", None),
        ("self.queue", "self.old_queue", None),
        ("    kept: int\n", "    kept: int\n    more: str\n", None),
        ("more=None", "more=None, *, extra=0", None),
        ("    @property\n    def size(self): return 1\n", "    size = 1\n", None),
        ("def inherited(self): return 1", "def inherited(self, more=0): return 1", None),
        ("self.queue", "self.line", ("Core.queue | vllm.core:Core.old_queue", "is missing", "pause")),
        ("class Core(Base)", "class Core", ("Core.inherited", "is missing", "pause")),
        ("def size", "def length", ("Core.size", "is missing", "pause")),
        ("def begin", "async def begin", ("Core.begin", "called as before", "pause")),
        ("more=None", "other=None", ("Core.begin", "use.py:7 passes more", "pause")),
        ("more=None", "more, third", ("Core.begin", "does not pass third", "pause")),
        ("def send", "def transmit", ("Core.send | async vllm.core:Core.send", "is missing", "spans")),
        ("def helper(a)", "def helper(a, b)", ("vllm.core:helper", "does not pass b", "generation")),
        ("def helper", "def other", ("vllm.core:helper", "is missing", "generation")),
        ('"flag"', '"other"', ("'flag'", "is missing", "pause")),
        ("core.mark", "core.other", ("'mark'", "is missing", "pause")),
        ("core.socket", "core.other", ("'.socket'", "is missing", "pause")),
        ("    def send", "    def rejects(self): ...\n    def send", ("Core.rejects", "exists", "pause")),
        ("    def send", f"{PROPERTY}    def send", ("Core.queue", "assigns", "pause")),
    ],
)  # fmt: skip
def test_a_change_breaks_what_uses_it(
    changed: Changed, old: str, new: str, expected: tuple[str, str, str] | None
) -> None:
    found = changed((old, new))
    if expected is None:
        assert found == []
        return
    (difference,) = found
    name, change, breaks = expected
    assert name in difference.name and change in difference.change
    assert difference.breaks == (breaks,) and difference.used_by == ("verl_bridge/use.py",)
    assert not difference.cpu_only and difference.breaks_on(cpu=False)


def test_a_missing_class_is_one_difference_of_all_that_needs_it(changed: Changed) -> None:
    found = changed(("class Core(Base)", "class Engine(Base)"))
    assert {(one.name, one.cpu_only) for one in found if one.name == "vllm.core:Core"} == {
        ("vllm.core:Core", False),
        ("vllm.core:Core", True),
    }
    (row,) = [one for one in found if one.name == "vllm.core:Core" and not one.cpu_only]
    assert set(row.breaks) == {"generation", "pause"}


def test_what_only_a_cpu_needs_breaks_runs_there(changed: Changed) -> None:
    found = {one.cpu_only: one for one in changed(("    kept: int\n", ""))}
    assert found[True].breaks == ("loads on a CPU",) and found[True].breaks_on(cpu=True)
    assert not found[True].breaks_on(cpu=False) and found[False].breaks_on(cpu=False)


def test_a_declared_name_that_the_tested_version_lacks_is_refused(changed: Changed, tmp_path: Path) -> None:
    changed()
    (tmp_path / "vllm/core.py").write_text(ENGINE.replace("def begin", "def start"), encoding="utf-8")
    sources = declared.sources_of("vllm", tmp_path / "vllm", tmp_path / "pkg")
    engine = EngineTree(name="vllm", folder=tmp_path / "vllm", version="1.0")
    with pytest.raises(ContractError, match=r"lacks vllm\.core:Core\.begin"):
        engines.record(engine, sources)


# Finding an engine.


def tree_at(folder: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def test_an_engine_is_found_in_a_folder_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = "__version__ = version = '0.33.0'\n"
    root = tree_at(tmp_path, {"vllm/__init__.py": "", "vllm/_version.py": version, "sglang/__init__.py": ""})
    vllm, sglang = engines.unpacked(root)
    assert (vllm.name, vllm.version, vllm.folder) == ("vllm", "0.33.0", root / "vllm")
    assert sglang.name == "sglang"
    assert sglang.version == "unknown", "not the version of the installed one"
    assert engines.unpacked(root / "vllm") == [vllm], "the package itself"
    monkeypatch.chdir(root / "vllm")
    assert engines.unpacked(Path()) == [vllm], "also by a relative path"
    with pytest.raises(ContractError, match="give the folder that contains"):
        engines.unpacked(tmp_path / "vllm" / "none")


@pytest.mark.parametrize(
    ("engine", "file", "old", "new", "words"),
    [
        (
            "vllm",
            "model_executor/layers/utils.py",
            "def check_cpu_sgl_kernel(n: int,",
            "def check_cpu_sgl_kernel(more, n: int,",
            "passes 4 arguments by position, 3 are taken",
        ),
        (
            "sglang",
            "srt/constrained/xgrammar_backend.py",
            "def apply_vocab_mask(self, logits: torch.Tensor, vocab_mask: torch.Tensor)",
            "def apply_vocab_mask(self, logits: torch.Tensor, mask: torch.Tensor)",
            "may pass mask by name",
        ),
    ],
)
def test_a_replaced_function_is_compared_with_the_one_in_its_place(
    engine: str, file: str, old: str, new: str, words: str
) -> None:
    tree = INSTALLED.get(engine)
    if tree is None or not SHIPPED[engine].is_of(tree):
        pytest.skip(f"reads {engine} {SHIPPED[engine].version}, which is not installed")
    plain = declared.sources_of(engine, tree.folder)
    changed = tree.folder / file
    assert old in changed.read_text(encoding="utf-8")

    def read(path: Path) -> bytes:
        return plain.read(path).replace(old.encode(), new.encode()) if path == changed else plain.read(path)

    found = engines.compare(tree, SHIPPED[engine], dataclasses.replace(plain, read=read))
    assert any(words in str(one) for one in found.differences), found.differences


def test_the_tested_release_is_not_compared() -> None:
    engine = EngineTree(name="vllm", folder=Path("nowhere"), version="0.99.0")
    tested = dataclasses.replace(SHIPPED["vllm"], files_id=files_id(engine.folder, SHIPPED["vllm"].files))
    assert engines.breaking_runs(engine, tested, cpu=True) == []


# The file.


def test_a_contract_is_read_back(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(engines.as_text(list(SHIPPED.values())))
    assert engines.load(tmp_path) == SHIPPED


@pytest.mark.parametrize("text", [None, "{", "[]", '{"vllm": {}}'])
def test_a_damaged_contract_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / FILE).write_text(text)
    with pytest.raises(ContractError, match="is not a contract with engines"):
        engines.load(tmp_path)


def test_own_sources_are_only_the_files_of_the_table() -> None:
    sources = declared.sources_of("vllm", Path("nowhere"))
    names = {module.name for module in sources.own_modules()}
    assert len(names) == len(sources.files or ()) and all(name.startswith(OURS) for name in names)
