# SPDX-License-Identifier: Apache-2.0
"""Compare a verl tree with the contract: one problem for each thing that is missing or has changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recipe.async_pipeline.installed.verl import has, keys_of_tree
from recipe.async_pipeline.tools.patches import series, verl_source

from . import config_keys, record, signatures, trees
from .shapes import shape_of
from .sources import Sources
from .uses import Use, uses_of

Severity = Literal["breaks", "changed"]
Subject = Literal["names", "overrides", "config keys", "patches"]
_NAMED_USERS = 2


@dataclass(frozen=True, kw_only=True)
class ContractProblem:
    """A thing of verl that is not as this package expects it."""

    subject: Subject
    severity: Severity
    what: str
    """Place, key, or patch and file."""
    detail: str


@dataclass(frozen=True, kw_only=True)
class TreeComparison:
    """How a tree fits."""

    root: str
    verl: str
    pin: str
    """The version that the contract was derived from."""
    checked: Mapping[str, int]
    """How many things of each subject were compared."""
    problems: tuple[ContractProblem, ...]

    def of(self, subject: str) -> list[ContractProblem]:
        """Return the problems of one subject."""
        return [problem for problem in self.problems if problem.subject == subject]


def compare(root: Path, folder: Path) -> TreeComparison:
    """Compare the tree at `root` with the contract and the series of `folder`.

    Raises PatchError if `root` has no verl, and ContractError if a file of it cannot be parsed.
    """
    version = verl_source.version_of(root)
    contract = record.load(folder)
    contents, fits = trees.patched(root, series.load_series(folder))
    sources = trees.sources_of(root, contents)
    users: dict[str, list[Use]] = defaultdict(list)
    for use in uses_of(sources):
        users[use.place].append(use)

    overridden = {
        place for place, known in contract.users.items() if any("overrides" in user for user in known)
    }
    problems = [
        *_shapes(sources, contract, users, overridden),
        *_abstract(sources, contract),
        *_keys(sources, contract, root),
        *_patches(fits),
    ]
    checked = {
        "names": len(contract.shapes.keys() - overridden),
        "overrides": len(contract.shapes.keys() & overridden),
        "config keys": len(set().union(*contract.keys.values())),
        "patches": len({fit.patch for fit in fits}),
    }
    return TreeComparison(
        root=str(root), verl=version, pin=contract.verl, checked=checked, problems=tuple(problems)
    )


def _shapes(
    sources: Sources, contract: record.Contract, users: Mapping[str, list[Use]], overridden: set[str]
) -> Iterator[ContractProblem]:
    missing: set[str] = set()
    for place, before in sorted(contract.shapes.items()):
        module, _, name = place.partition(":")
        if {module, place.rpartition(".")[0]} & missing:
            continue  # missing with its module or its class
        subject: Subject = "overrides" if place in overridden else "names"
        used = _used_by(contract.users[place])
        if sources.module(module) is None:
            missing.add(module)
            yield ContractProblem(
                subject=subject, severity="breaks", what=module, detail=f"is missing; {used}"
            )
            continue

        now = shape_of(sources, place)
        if now is None:
            missing.add(place)
            yield ContractProblem(
                subject=subject, severity="breaks", what=place, detail=f"is missing; {used}"
            )
        elif now != before:
            conflicts = list(_conflicts(before, now, users.get(place, ())))
            yield ContractProblem(
                subject=subject,
                severity="breaks" if conflicts else "changed",
                what=place,
                detail=f"was {before}, is {now}; " + ("; ".join(conflicts) or f"{used}, which still fits"),
            )


def _conflicts(before: str, now: str, users: Iterable[Use]) -> Iterator[str]:
    """Yield the uses that fitted the shape `before` and do not fit the shape `now`."""
    old, new = signatures.from_text(before), signatures.from_text(now)
    for use in users:
        if old is None or new is None:
            yield f"{use.where} {use.how} it as before"
            continue
        why = _conflict(use, new, bound=not now.startswith("static"))
        if why is not None and why != _conflict(use, old, bound=not before.startswith("static")):
            yield f"{use.where} {why}" if use.call else f"{use.where} overrides it, but {why}"


def _conflict(use: Use, now: signatures.Signature, *, bound: bool) -> str | None:
    """Return why a use does not fit the new signature, or None."""
    if use.signature is not None:
        return signatures.override_conflict(use.signature, now)
    if use.call is not None:
        is_method = "." in use.place.partition(":")[2]
        return (now.without_self() if is_method and bound else now).refuses(use.call)
    return None


def _used_by(users: tuple[str, ...]) -> str:
    """Name the first users."""
    more = f" and {len(users) - _NAMED_USERS} more" if len(users) > _NAMED_USERS else ""
    return f"{', '.join(users[:_NAMED_USERS])}{more}"


def _abstract(sources: Sources, contract: record.Contract) -> Iterator[ContractProblem]:
    for place, left in record.unimplemented(sources).items():
        new = sorted(set(left) - set(contract.unimplemented.get(place, ())))
        if new:
            yield ContractProblem(
                subject="overrides",
                severity="breaks",
                what=place,
                detail=f"verl's base has the new abstract methods {', '.join(new)}, which it lacks",
            )


def _keys(sources: Sources, contract: record.Contract, root: Path) -> Iterator[ContractProblem]:
    trees_of = keys_of_tree(root)
    users: dict[str, set[str]] = defaultdict(set)
    for path, user in config_keys.named_keys(sources):
        users[path].add(f"{user} (names)")

    missing: set[str] = set()
    for file, paths in contract.keys.items():
        for path in paths:
            parts = path.split(".")
            above = {".".join(parts[:size]) for size in range(1, len(parts) + 1)}
            if not above & missing and not has(trees_of.get(file, {}), path):
                missing.add(path)
                detail = f"is missing in {file}; {_used_by(tuple(sorted(users[path])))}"
                yield ContractProblem(subject="config keys", severity="breaks", what=path, detail=detail)


def _patches(fits: Iterable[trees.PatchFit]) -> Iterator[ContractProblem]:
    for fit in fits:
        if fit.state not in ("fits", "applied"):
            yield ContractProblem(
                subject="patches",
                severity="breaks" if fit.state == "broken" else "changed",
                what=f"{fit.patch} on {fit.path}",
                detail=trees.STATES[fit.state],
            )
