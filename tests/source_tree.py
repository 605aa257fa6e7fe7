# SPDX-License-Identifier: Apache-2.0
"""The modules of the package as tests read them: each file is parsed once."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache

from tests import REPOSITORY

PACKAGE = REPOSITORY / "recipe" / "async_pipeline"
OWN_NAME = "recipe.async_pipeline"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@cache
def parse(module: str) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text(encoding="utf-8"))


@cache
def nodes_of(module: str) -> Sequence[ast.AST]:
    return [*ast.walk(parse(module))]


def below(*folders: str) -> list[str]:
    """Return the modules in these folders, which end in a slash."""
    found = [m for m in MODULES if m.startswith(folders)]
    assert found
    return found
