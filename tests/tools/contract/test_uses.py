# SPDX-License-Identifier: Apache-2.0
"""What a small package uses of a small verl."""

from __future__ import annotations

from recipe.async_pipeline.tools.contract.signatures import CallShape
from recipe.async_pipeline.tools.contract.uses import subclasses, uses_of

from .conftest import MakeSources

VERL = """
class Base:
    def run(self, batch): self.state = 1
    def stop(self): ...
    def kept(self): ...
class Mode:
    FAST = 1
def helper(a, b=0): ...
REGISTRY = {}
"""
OURS = """
from verl.base import Base, Mode, helper
import verl.base as whole
TARGET = "verl.base.Mode"
NOT_A_PATH = "verl.nothing.here"

class Mixin:
    def stop(self):
        self.kept()
        return self.state

class Mine(Mixin, Base):
    async def run(self, batch, more=None):
        super().run(batch)
        helper(1, b=2)
        whole.REGISTRY["x"] = Mode.FAST
        setattr(whole, "helper", None)

def late():
    from verl.base import Base as Other
    return Other()
"""


def test_every_kind_of_use_is_found(sources_of: MakeSources) -> None:
    sources = sources_of({"verl/base.py": VERL, "pkg/mine.py": OURS})
    found = {(use.place.partition(":")[2], use.how) for use in uses_of(sources)}
    assert found == {
        ("", "imports"),
        ("Base", "imports"),
        ("Mode", "imports"),
        ("helper", "imports"),
        ("Mode", "uses"),
        ("Base.run", "overrides"),
        ("Base.stop", "overrides"),
        ("Base.run", "calls"),
        ("Base.kept", "calls"),
        ("Base.state", "inherits"),
        ("helper", "calls"),
        ("helper", "uses"),
        ("REGISTRY", "uses"),
        ("Mode.FAST", "uses"),
        ("Base.__init__", "calls"),
    }


def test_members_of_an_annotated_attribute_are_used(sources_of: MakeSources) -> None:
    ours = """
from verl.base import Base
class Run:
    base: Base
    other: int
    def go(self):
        self.base.run(1)
        return self.base.state, self.base.nothing, self.other.kept
"""
    sources = sources_of({"verl/base.py": VERL, "pkg/mine.py": ours})
    found = {(use.place, use.how) for use in uses_of(sources)} - {("verl.base:Base", "imports")}
    assert found == {("verl.base:Base.run", "uses"), ("verl.base:Base.state", "uses")}


def test_a_module_of_a_folder_without_init_is_followed(sources_of: MakeSources) -> None:
    ours = "from verl.loose import base\nbase.helper(1)\n"
    sources = sources_of({"verl/loose/base.py": VERL, "pkg/mine.py": ours})
    assert {(use.place, use.how) for use in uses_of(sources)} == {
        ("verl.loose.base", "imports"),
        ("verl.loose.base:helper", "uses"),
        ("verl.loose.base:helper", "calls"),
    }


def test_a_row_of_the_table_of_replacements_is_a_use_of_what_it_replaces(sources_of: MakeSources) -> None:
    rows = """
ROWS = (
    Replacement("verl.base", "Base.run", "mine:run", why="", remove_when=""),
    Replacement("verl.base", "added", "mine:added", why="", remove_when=""),
    Replacement("other.base", "helper", "mine:helper", why="", remove_when=""),
)
"""
    sources = sources_of({"verl/base.py": VERL, "pkg/replaced.py": rows})
    assert [(use.place, use.how) for use in uses_of(sources)] == [("verl.base:Base.run", "replaces")]


def test_a_use_has_its_arguments_or_its_signature_and_its_line(sources_of: MakeSources) -> None:
    sources = sources_of({"verl/base.py": VERL, "pkg/mine.py": OURS})
    by = {(use.place, use.how): use for use in uses_of(sources)}
    assert by["verl.base:helper", "calls"].call == CallShape(positional=1, names=("b",), open=False)
    override = by["verl.base:Base.run", "overrides"]
    assert override.where == "mine.py:13" and override.signature is not None
    assert override.signature.is_async and override.signature.positional == ("self", "batch", "more")


def test_a_class_has_the_verl_classes_of_its_bases(sources_of: MakeSources) -> None:
    more = "from recipe.async_pipeline.mine import Mine\nclass Lower(Mine): ...\n"
    sources = sources_of({"verl/base.py": VERL, "pkg/mine.py": OURS, "pkg/z.py": more})
    assert {s.found.name: s.bases for s in subclasses(sources)} == {
        "Mine": ("verl.base:Base",),
        "Lower": ("verl.base:Base",),
    }
