# SPDX-License-Identifier: Apache-2.0
"""The arguments and fields of an engine that a module names by keywords."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.async_pipeline.tools.contract.arguments import arguments_in, fields_in
from recipe.async_pipeline.tools.contract.sources import OURS, THEIRS, Module, Sources

FILES = {
    "vllm/__init__.py": "",
    "vllm/core.py": "class Arguments:\n    seed: int\nclass Request:\n    id: int\n    name: str\n",
    "verl/__init__.py": "",
    "verl/served.py": "from vllm.core import Request\nclass Tensors(Request):\n    tensors: object\n",
    "pkg/__init__.py": "",
}


def parsed(folder: Path, code: str) -> tuple[Sources, Module]:
    """Return the sources and the module with some code."""
    for path, text in {**FILES, "pkg/use.py": code}.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    roots = {"vllm": folder / "vllm", THEIRS: folder / "verl", OURS: folder / "pkg"}
    sources = Sources(roots=roots, theirs="vllm")
    module = sources.module(f"{OURS}.use")
    assert module is not None
    return sources, module


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("Arguments(seed=0)", {"seed"}),
        ("more = {'size': 1}; Arguments(**more)", {"size"}),
        ("more: dict = {'size': 1} if flag else {'step': 2}; Arguments(**more)", {"size", "step"}),
        ("more = {}; more['size'] = 1; Arguments(**more)", {"size"}),
        ("class More(Arguments): ...\n    More(seed=0)", {"seed"}),
        ("other(seed=0)", set()),
        ("more = {'size': 1}; other(**more)", set()),
    ],
)
def test_what_a_call_of_an_engines_class_passes_on(tmp_path: Path, code: str, expected: set[str]) -> None:
    text = f"from vllm.core import Arguments\ndef use(flag, other):\n    {code}\n"
    assert {*arguments_in(*parsed(tmp_path, text))} == expected


def test_the_words_of_a_constant_by_engine(tmp_path: Path) -> None:
    text = "NAMES: object = {'vllm': ('one', 'two'), 'sglang': 'three'}\n"
    assert {*arguments_in(*parsed(tmp_path, text))} == {"one", "two"}


def test_the_fields_that_a_class_of_verl_has_from_the_engine(tmp_path: Path) -> None:
    text = "from verl.served import Tensors\nTensors(id=1, name='a', tensors=None)\n"
    assert {*fields_in(*parsed(tmp_path, text))} == {"vllm.core:Request.id", "vllm.core:Request.name"}
