# SPDX-License-Identifier: Apache-2.0
"""Signatures as text, without annotations and values: `async def (self, a, b=..., *, c, **rest)`."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class CallShape:
    """The shape of the arguments of a call."""

    positional: int
    names: tuple[str, ...]
    open: bool
    """Whether it has `*args` or `**kwargs`, whose contents are unknown."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The parameters of a function."""

    positional: tuple[str, ...]
    optional: int
    """Number of positional parameters with a default; the last ones."""
    keywords: tuple[str, ...]
    """Keyword-only parameters."""
    required: tuple[str, ...]
    """Keyword-only parameters without a default."""
    more_positional: bool = False
    more_keywords: bool = False
    is_async: bool = False

    def without_self(self) -> Signature:
        """Return the signature of the bound method."""
        rest = self.positional[1:]
        return Signature(
            positional=rest,
            optional=min(self.optional, len(rest)),
            keywords=self.keywords,
            required=self.required,
            more_positional=self.more_positional,
            more_keywords=self.more_keywords,
            is_async=self.is_async,
        )

    def refuses(self, call: CallShape) -> str | None:
        """Return why the call does not fit, or None if it fits or cannot be judged."""
        if call.positional > len(self.positional) and not self.more_positional:
            return f"passes {call.positional} arguments by position, {len(self.positional)} are taken"

        twice = [name for name in self.positional[: call.positional] if name in call.names]
        if twice:
            return f"passes {', '.join(twice)} by position and by name"

        taken = {*self.positional[call.positional :], *self.keywords}
        unknown = [name for name in call.names if name not in taken]
        if unknown and not self.more_keywords:
            return f"passes {', '.join(unknown)}, which is not taken"
        if call.open:
            return None

        needed = self.positional[call.positional : len(self.positional) - self.optional]
        missing = [name for name in (*needed, *self.required) if name not in call.names]
        return f"does not pass {', '.join(missing)}" if missing else None


def of_function(node: FunctionNode) -> Signature:
    """Read the signature of a function."""
    a = node.args
    pairs = zip(a.kwonlyargs, a.kw_defaults, strict=True)
    return Signature(
        positional=tuple(x.arg for x in (*a.posonlyargs, *a.args)),
        optional=len(a.defaults),
        keywords=tuple(x.arg for x in a.kwonlyargs),
        required=tuple(x.arg for x, default in pairs if default is None),
        more_positional=a.vararg is not None,
        more_keywords=a.kwarg is not None,
        is_async=isinstance(node, ast.AsyncFunctionDef),
    )


def of_call(node: ast.Call) -> CallShape:
    """Read the arguments of a call."""
    return CallShape(
        positional=sum(not isinstance(arg, ast.Starred) for arg in node.args),
        names=tuple(keyword.arg for keyword in node.keywords if keyword.arg is not None),
        open=any(isinstance(arg, ast.Starred) for arg in node.args)
        or any(keyword.arg is None for keyword in node.keywords),
    )


def as_text(signature: Signature) -> str:
    """Return the signature as the text that `from_text` reads."""
    first = len(signature.positional) - signature.optional
    parts = [name if at < first else f"{name}=..." for at, name in enumerate(signature.positional)]
    if signature.more_positional:
        parts.append("*args")
    elif signature.keywords:
        parts.append("*")
    parts += [name if name in signature.required else f"{name}=..." for name in signature.keywords]
    if signature.more_keywords:
        parts.append("**kwargs")
    return f"{'async ' if signature.is_async else ''}def ({', '.join(parts)})"


def from_text(text: str) -> Signature | None:
    """Return the signature that `as_text` wrote, after any kind of method; None if the text is not one."""
    _, found, rest = text.partition("def (")
    if not found:
        return None
    prefix = "async " if "async def (" in text else ""
    parsed = ast.parse(f"{prefix}def f({rest}: ...").body[0]
    assert isinstance(parsed, FunctionNode)
    return of_function(parsed)


def override_conflict(own: Signature, base: Signature, caller: str = "verl") -> str | None:
    """Return why `own` cannot be called as `base` is by `caller`, or None if it can."""
    if own.is_async != base.is_async:
        return (
            f"{caller}'s method is {'async' if base.is_async else 'not async'}, the override is not the same"
        )

    least, most = len(base.positional) - base.optional, len(base.positional)
    for positional in dict.fromkeys((least, most)):
        full = positional == most
        names = base.keywords if full else base.required
        why = own.refuses(CallShape(positional=positional, names=tuple(names), open=False))
        if why is not None:
            return f"{caller} {why}"
    return _renamed(own, base.positional[1:], caller)


def _renamed(own: Signature, names: Sequence[str], caller: str) -> str | None:
    """Return which parameters could not be passed by name."""
    if own.more_keywords:
        return None
    unknown = [name for name in names if name not in (*own.positional, *own.keywords)]
    return (
        f"{caller} may pass {', '.join(unknown)} by name, the override has no such parameter"
        if unknown
        else None
    )
