# SPDX-License-Identifier: Apache-2.0
"""The shipped contract is the one of the code and the pinned verl."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.async_pipeline.errors import ContractError
from recipe.async_pipeline.installed.engines import FILE as ENGINES_FILE
from recipe.async_pipeline.installed.verl import patches_dir
from recipe.async_pipeline.tools.contract import engines, record, trees
from recipe.async_pipeline.tools.contract.shapes import shape_of
from recipe.async_pipeline.tools.contract.uses import uses_of
from recipe.async_pipeline.tools.patches import series, verl_source

from .conftest import MakeSources


@pytest.mark.slow
def test_the_shipped_contract_is_current(pinned: Path) -> None:
    folder = patches_dir()
    shipped, now = record.load(folder), record.of_tree(pinned, folder)
    remedy = "run `bash run_scripts/fix.sh`"
    assert shipped.shapes == now.shapes, remedy
    assert (shipped.unimplemented, shipped.keys) == (now.unimplemented, now.keys), remedy


@pytest.mark.slow
def test_nothing_that_the_package_uses_comes_from_a_patch(pinned: Path) -> None:
    """A verl without patches has it too, as `trainer.v1.trainer_mode=async_pipeline` requires."""
    folder = patches_dir()
    paths = series.load_series(folder).chains
    published = {pinned / path: verl_source.published_file(folder, path) or b"" for path in paths}
    sources = trees.sources_of(pinned, published)
    touched = {path.removesuffix(".py").replace("/", ".") for path in paths}
    shapes = {
        place: shape
        for place, shape in record.load(folder).shapes.items()
        if place.partition(":")[0] in touched
    }
    assert shapes, "the patches touch modules that this package uses"
    assert {place: shape_of(sources, place) for place in shapes} == shapes


def test_a_contract_has_shapes_users_and_keys(sources_of: MakeSources) -> None:
    verl = """
from abc import abstractmethod
class Base:
    flag = True
    @property
    def size(self): ...
    @classmethod
    def make(cls, a): ...
    @abstractmethod
    def must(self): ...
class Plain:
    a: int
    b: int = 0
"""
    own = """
from verl.base import Base, Plain
KEY = "data.seed"
class Mine(Base):
    def use(self): return self.flag, self.size, Base.make(1), Plain(1)
"""
    sources = sources_of({"verl/base.py": verl, "pkg/mine.py": own})
    found = record.derive(sources, uses_of(sources), {"ppo.yaml": {"data": {"seed": 1}}}, "1.0")
    assert found.shapes == {
        "verl.base:Base": "class",
        "verl.base:Base.flag": "value",
        "verl.base:Base.make": "classmethod def (cls, a)",
        "verl.base:Base.size": "property",
        "verl.base:Plain": "class",
        "verl.base:Plain.__init__": "def (self, a, b=...)",
    }
    assert found.users["verl.base:Plain.__init__"] == ("mine.py (calls)",)
    assert found.unimplemented == {"recipe.async_pipeline.mine:Mine": ("must",)}
    assert found.keys == {"ppo.yaml": ("data.seed",)}


def test_a_contract_is_read_back(tmp_path: Path) -> None:
    contract = record.load(patches_dir())
    (tmp_path / record.FILE).write_text(record.as_text(contract))
    assert record.load(tmp_path) == contract and contract.shapes and contract.keys


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
def test_a_damaged_contract_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / record.FILE).write_text(text)
    with pytest.raises(ContractError, match="is not a contract"):
        record.load(tmp_path)


def test_engines_in_conflict_are_recorded_if_all_are_installed(tmp_path: Path) -> None:
    shipped = engines.load(patches_dir())
    file = tmp_path / ENGINES_FILE
    file.write_text("<<<<<<< HEAD\n" + engines.as_text(list(shipped.values())), encoding="utf-8")
    assert record.of_all_engines(shipped, tmp_path) == list(shipped.values())
    with pytest.raises(ContractError, match="is not a contract"):
        record.of_all_engines({"vllm": shipped["vllm"]}, tmp_path)


def test_engines_that_are_not_installed_keep_their_record(tmp_path: Path) -> None:
    shipped = engines.load(patches_dir())
    vllm = {"vllm": shipped["vllm"]}
    assert record.of_all_engines(vllm, patches_dir()) == list(shipped.values())
    assert record.of_all_engines(vllm, tmp_path) == [shipped["vllm"]]
