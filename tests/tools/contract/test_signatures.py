# SPDX-License-Identifier: Apache-2.0
"""Which calls and overrides fit a signature, compared with Python's own answer."""

from __future__ import annotations

import ast
import inspect
import itertools

import pytest

from recipe.async_pipeline.tools.contract import signatures
from recipe.async_pipeline.tools.contract.signatures import CallShape, Signature

PARAMETERS = (
    "self",
    "self, a",
    "self, a, b=1",
    "self, a=1, *, c",
    "self, a, *, c=1",
    "self, *rest",
    "self, a, **more",
    "self, *, c, d=1, **more",
)


def signature_of(parameters: str, prefix: str = "") -> Signature:
    node = ast.parse(f"{prefix}def f({parameters}): ...").body[0]
    assert isinstance(node, signatures.FunctionNode)
    return signatures.of_function(node)


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_a_call_fits_exactly_if_python_can_bind_it(parameters: str) -> None:
    scope: dict[str, object] = {}
    exec(f"def f({parameters}): ...", scope)
    bound = inspect.signature(scope["f"])  # type: ignore[arg-type]
    for positional in range(4):
        for size in range(4):
            for names in itertools.combinations(("a", "b", "c", "other"), size):
                call = CallShape(positional=positional, names=names, open=False)
                try:
                    bound.bind(*range(positional), **dict.fromkeys(names))
                    fits = True
                except TypeError:
                    fits = False
                assert (signature_of(parameters).refuses(call) is None) is fits, call


def test_a_call_with_stars_is_refused_only_for_what_it_names() -> None:
    star = signatures.of_call(ast.parse("f(1, *rest, **more)", mode="eval").body)  # type: ignore[arg-type]
    assert star == CallShape(positional=1, names=(), open=True)
    assert signature_of("a, b, *, c").refuses(star) is None
    assert signature_of("").refuses(star) == "passes 1 arguments by position, 0 are taken"


@pytest.mark.parametrize("prefix", ["", "async "])
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_the_text_is_read_back(parameters: str, prefix: str) -> None:
    found = signature_of(parameters, prefix)
    assert signatures.from_text(signatures.as_text(found)) == found
    assert signatures.from_text(f"classmethod {signatures.as_text(found)}".split(" ", 1)[1]) == found


@pytest.mark.parametrize("kind", ["staticmethod", "classmethod"])
def test_the_kind_of_a_method_is_no_part_of_the_signature(kind: str) -> None:
    assert signatures.from_text(f"{kind} async def (a)") == signature_of("a", "async ")
    assert signatures.from_text("class") is signatures.from_text("property") is None


@pytest.mark.parametrize(
    ("own", "base", "fits"),
    [
        ("self, a", "self, a", True),
        ("self, a, b=1", "self, a", True),
        ("self, *args, **kwargs", "self, a, *, c", True),
        ("self, a", "self, a, b=1", False),
        ("self, a, b", "self, a", False),
        ("self, b", "self, a", False),
        ("self, a", "self, a, *, c=1", False),
        ("self, a, c=1", "self, a, *, c=1", True),
    ],
)
def test_an_override_must_take_every_call_of_its_base(own: str, base: str, fits: bool) -> None:
    assert (signatures.override_conflict(signature_of(own), signature_of(base)) is None) is fits


def test_an_override_must_be_awaited_as_its_base() -> None:
    own, base = signature_of("self"), signature_of("self", "async ")
    assert "async" in (signatures.override_conflict(own, base) or "")
    assert "not async" in (signatures.override_conflict(base, own) or "")


def test_a_bound_method_has_no_self() -> None:
    assert signature_of("self, a, b=1").without_self() == signature_of("a, b=1")
    assert signature_of("self=1").without_self() == signature_of("")
