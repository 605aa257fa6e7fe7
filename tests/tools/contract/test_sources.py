# SPDX-License-Identifier: Apache-2.0
"""Names are followed to their definitions, and classes have the members of their bases."""

from __future__ import annotations

import ast

import pytest

from recipe.async_pipeline.errors import ContractError
from recipe.async_pipeline.tools.contract.sources import ClassMember, Definition

from .conftest import MakeSources


def place(found: Definition | ClassMember | None) -> str | None:
    if isinstance(found, Definition):
        return found.place
    return None if found is None else found.owner.place


def test_a_name_is_followed_through_re_exports(sources_of: MakeSources) -> None:
    sources = sources_of(
        {
            "verl/a/__init__.py": "from .b import *\nfrom .b import inner as outer\nimport os\n",
            "verl/a/b.py": "from ..c import inner\nclass Star: ...\n",
            "verl/c.py": "try:\n    from third import inner\nexcept ImportError:\n    def inner(): ...\n",
        }
    )
    assert place(sources.at("verl.a:outer")) == "verl.c:inner"
    assert place(sources.at("verl.a:Star")) == "verl.a.b:Star"
    assert place(sources.at("verl.a:b")) == place(sources.at("verl.a.b")) == "verl.a.b"
    assert place(sources.at("verl.a:os")) == "verl.a:os"
    assert sources.at("verl.a:gone") is sources.at("verl.gone:x") is sources.at("verl.gone") is None


def test_a_circle_of_imports_ends(sources_of: MakeSources) -> None:
    sources = sources_of({"verl/a.py": "from .b import x\n", "verl/b.py": "from .a import x\n"})
    assert sources.at("verl.a:x") is None


def test_a_class_has_the_members_of_its_bases(sources_of: MakeSources) -> None:
    sources = sources_of(
        {
            "verl/a.py": "class Top:\n def run(self): self.made = 1\n def both(self): ...\n field: int = 0\n",
            "verl/b.py": "from verl import a\nclass Low(a.Top):\n    def both(self): ...\n",
        }
    )
    found = sources.at("verl.b:Low")
    assert isinstance(found, Definition)
    members = sources.members(found)
    assert {name: member.owner.place for name, member in members.items()} == {
        "both": "verl.b:Low",
        "run": "verl.a:Top",
        "field": "verl.a:Top",
        "made": "verl.a:Top",
    }
    assert place(sources.at("verl.b:Low.made")) == "verl.a:Top" and sources.at("verl.b:Low.gone") is None


@pytest.mark.parametrize(
    "stub",
    [
        "@abstractmethod\n    def run(self): return self.made",
        "def run(self): ...",
        "async def run(self):\n        'Says what it should do.'\n        raise NotImplementedError",
        "run: ClassVar[int | None] = None",
        "run: ClassVar[dict[str, int]] = {}",
    ],
)
def test_a_stub_of_a_base_is_no_member_of_its_subclass(sources_of: MakeSources, stub: str) -> None:
    sources = sources_of(
        {
            "verl/a.py": f"class Top:\n    {stub}\n    kept: int = None\n",
            "verl/b.py": "from verl import a\nclass Low(a.Top):\n    def ran(self): return 1\n",
        }
    )
    assert sources.at("verl.b:Low.run") is None and place(sources.at("verl.a:Top.run")) == "verl.a:Top"
    assert place(sources.at("verl.b:Low.kept")) == "verl.a:Top"


def test_a_definition_wins_over_its_fallback(sources_of: MakeSources) -> None:
    text = "try:\n    class A: ...\nexcept ImportError:\n    A = None\nif x:\n    def f(): ...\n"
    sources = sources_of({"verl/a.py": text})
    found, function = sources.find("verl.a", "A"), sources.find("verl.a", "f")
    assert found is not None and isinstance(found.node, ast.ClassDef)
    assert function is not None and function.kind == "function"


def test_a_file_that_cannot_be_parsed_is_named(sources_of: MakeSources) -> None:
    with pytest.raises(ContractError, match=r"a\.py cannot be parsed"):
        sources_of({"verl/a.py": "def ("}).module("verl.a")


@pytest.mark.parametrize(
    ("mixin", "own", "found"),
    [
        ("def run(self): self.queue = []", "def __init__(self): self.queue = []", True),
        ("def run(self): self.queue = []", "def __init__(self): self.line = []", False),
        ("def init_queue(self): self.queue = []", "def __init__(self): self.init_queue()", True),
    ],
)
def test_a_mixin_that_changes_an_attribute_does_not_give_it(
    sources_of: MakeSources, mixin: str, own: str, found: bool
) -> None:
    text = f"class Mixin:\n    {mixin}\nclass Core(Mixin):\n    {own}\n"
    sources = sources_of({"verl/core.py": text})
    assert (sources.at("verl.core:Core.queue") is not None) == found
