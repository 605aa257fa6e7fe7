# SPDX-License-Identifier: Apache-2.0
"""The contract with the engines: what the tested versions have of the things that this package uses.

`python -m recipe.async_pipeline.tools.contract.record` writes `patches/engines.json` from the code and from
the installed engines. Engines are read, never imported.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.async_pipeline.errors import ContractError
from recipe.async_pipeline.installed.engines import (
    ENGINES,
    FILE,
    EngineRelease,
    EngineTree,
    files_id,
    not_a_contract,
    version_in,
)

from . import declared, located, signatures
from .declared import Alternative, Need
from .sources import Sources

_READABLE = ("value", "property", "word")
_LONG = 90
"""Characters of a signature beyond which a message does not quote it."""
STARTS_IN_VERL = "start of a server by verl"
"""How the reason begins that no run with an engine can start, whatever this package does."""
NOT_IN_RUNS = ("benchmarks", "verify_gpu.sh")
"""What may break without effect on a run."""
EXPERTS = ("proof of experts", "experts on a CPU")
LATENT = ("proof of latent attention",)
LINEAR = ("proof of linear attention",)
REORDERED = ("proof of reordered weights",)
OF_MODELS = (*EXPERTS, *LATENT, *LINEAR, *REORDERED)
"""What only some models need."""
IN_SOME_RUNS = ("LoRA", "fp8", "replicas on several nodes", "share of device memory", *OF_MODELS)
"""What may break without effect on most runs: their settings and their model decide."""


@dataclass(frozen=True, kw_only=True)
class EngineContract(EngineRelease):
    """What one release of an engine has."""

    needs: tuple[Need, ...]
    shapes: Mapping[str, str | None]
    """By alternative: the shape of what is there, or None."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that this package uses of an engine and that is not as in the tested version."""

    name: str
    change: str
    used_by: tuple[str, ...]
    breaks: tuple[str, ...]
    """What does not work."""
    cpu_only: bool
    """Whether only runs on the CPU platform need it."""

    @property
    def is_verls(self) -> bool:
        """Whether verl itself cannot start the engine."""
        return any(one.startswith(STARTS_IN_VERL) for one in self.breaks)

    @property
    def in_some_runs(self) -> bool:
        """Whether most runs do without everything that breaks."""
        return set(self.breaks) <= {*IN_SOME_RUNS, *NOT_IN_RUNS}

    def breaks_on(self, *, cpu: bool) -> bool:
        """Return whether it breaks something on the platform, the CPU or not."""
        return cpu or not self.cpu_only


@dataclass(frozen=True, kw_only=True)
class EngineComparison:
    """How an engine fits."""

    engine: EngineTree
    tested: str
    """The version that the contract was derived from."""
    checked: int
    differences: tuple[Difference, ...]


def unpacked(root: Path) -> list[EngineTree]:
    """Return the engines below a folder, or the one in it. Raises ContractError without any.

    Their versions are what their files say, or `unknown`, as in a git checkout.
    """
    found, root = [], root.resolve()
    for name in ENGINES:
        for folder in (root / name, root):
            if folder.name == name and (folder / "__init__.py").is_file():
                version = version_in(folder) or "unknown"
                found.append(EngineTree(name=name, folder=folder, version=version))
                break
    if not found:
        raise ContractError(
            f"{root} has no vllm/__init__.py and no sglang/__init__.py; give the folder that contains "
            "vllm/ or sglang/"
        )
    return found


def record(engine: EngineTree, sources: Sources | None = None) -> EngineContract:
    """Return the contract with an engine. Raises ContractError if it lacks something that is declared."""
    plain, read = sources or declared.sources_of(engine.name, engine.folder), set[Path]()

    def noted(file: Path) -> bytes:
        read.add(file)
        return plain.read(file)

    sources = dataclasses.replace(plain, read=noted)
    needs = declared.needs_of(sources)
    shapes = {str(one): one.shape(sources) for need in needs for one in need.alternatives}
    for need in needs:
        if not any(_exists(one, shapes[str(one)]) for one in need.alternatives):
            raise ContractError(
                f"{engine.name} {engine.version} at {engine.folder} lacks {_name(need)}, which "
                f"{', '.join(need.used_by)} uses; correct {declared.TABLES.format(engine.name)}"
            )
    theirs = (file.relative_to(engine.folder) for file in read if file.is_relative_to(engine.folder))
    files = tuple(sorted(file.as_posix() for file in theirs))
    return EngineContract(
        engine=engine.name,
        version=engine.version.partition("+")[0],
        files=files,
        files_id=files_id(engine.folder, files),
        needs=tuple(needs),
        shapes=shapes,
    )


def as_text(contracts: Sequence[EngineContract]) -> str:
    """Return the contents of the file."""
    plain = {
        contract.engine: {
            "version": contract.version,
            "files": contract.files,
            "files_id": contract.files_id,
            "needs": [
                {
                    "any_of": {str(one): contract.shapes[str(one)] for one in need.alternatives},
                    "breaks": need.breaks,
                    "used_by": need.used_by,
                }
                for need in contract.needs
            ],
        }
        for contract in contracts
    }
    return json.dumps(plain, indent=1) + "\n"


def load(folder: Path) -> dict[str, EngineContract]:
    """Read `folder/engines.json`, by engine. Raises ContractError if it is missing or not a contract."""
    file = folder / FILE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        return {engine: _contract(engine, of_engine) for engine, of_engine in raw.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise not_a_contract(file, error) from None


def _contract(engine: str, raw: Any) -> EngineContract:
    needs = [
        Need(tuple(map(Alternative.of, need["any_of"])), need["breaks"], tuple(need["used_by"]))
        for need in raw["needs"]
    ]
    shapes = {alternative: shape for need in raw["needs"] for alternative, shape in need["any_of"].items()}
    return EngineContract(
        engine=engine,
        version=raw["version"],
        files=tuple(raw["files"]),
        files_id=raw["files_id"],
        needs=tuple(needs),
        shapes=shapes,
    )


def compare(engine: EngineTree, contract: EngineContract, sources: Sources | None = None) -> EngineComparison:
    """Compare an engine with the contract. Raises ContractError if a file of it cannot be parsed."""
    sources = sources or declared.sources_of(engine.name, engine.folder)
    found: dict[tuple[str, str, bool], list[Need]] = defaultdict(list)
    uses = located.Located(sources)
    for need in contract.needs:
        reasons = [_conflict(sources, contract, need, one, uses) for one in need.alternatives]
        if None not in reasons:
            place, change = next(reason for reason in reasons if reason is not None)
            name = place if len(need.alternatives) == 1 else _name(need)
            found[name, change, need.cpu_only].append(need)
    differences = tuple(
        Difference(
            name=name,
            change=change,
            used_by=tuple(sorted({file for need in needs for file in need.used_by})),
            breaks=tuple(dict.fromkeys(need.breaks for need in needs)),
            cpu_only=cpu_only,
        )
        for (name, change, cpu_only), needs in sorted(found.items(), key=lambda item: item[0][::2])
    )
    return EngineComparison(
        engine=engine, tested=contract.version, checked=len(contract.needs), differences=differences
    )


def breaking_runs(engine: EngineTree, contract: EngineContract, *, cpu: bool) -> list[Difference]:
    """Return the differences that break runs; the tested release has none and is not read."""
    if contract.is_of(engine):
        return []
    return [
        one
        for one in compare(engine, contract).differences
        if one.breaks_on(cpu=cpu) and not set(one.breaks) <= set(NOT_IN_RUNS)
    ]


def _name(need: Need) -> str:
    return " | ".join(map(str, need.alternatives))


def _exists(alternative: Alternative, shape: str | None) -> bool:
    if alternative.absent:
        return shape is None
    return shape is not None and (not alternative.is_async or _is_coroutine(shape))


def _is_coroutine(shape: str) -> bool:
    return "async def" in shape


def _conflict(
    sources: Sources, contract: EngineContract, need: Need, alternative: Alternative, uses: located.Located
) -> tuple[str, str] | None:
    """Return the place and the change that keep an alternative from meeting a need, or None."""
    before, now = contract.shapes[str(alternative)], alternative.shape(sources)
    if alternative.absent:
        return None if now is None else (alternative.place, "exists, which this package does not handle")
    if now is None:
        return _missing(sources, alternative.place)
    if alternative.is_async and not _is_coroutine(now):
        return alternative.place, "is no coroutine function"
    if before is None or before == now:
        return None
    change = _change(before, now, list(uses.of(alternative, need.used_by)), either=alternative.is_async)
    if change is None:
        return None
    both = f"was {before}, is {now}" if max(len(before), len(now)) < _LONG else "has another signature"
    return alternative.place, f"{both}: {change}"


def _missing(sources: Sources, place: str) -> tuple[str, str]:
    """Return the outermost place that is missing."""
    module, _, name = place.partition(":")
    owner = f"{module}:{name.rpartition('.')[0]}"
    if sources.module(module) is None:
        return module, "is missing"
    if "." in name and not name.startswith("'") and sources.at(owner) is None:
        return owner, "is missing"
    return place, "is missing"


def _change(before: str, now: str, uses: Sequence[located.MemberUse], *, either: bool) -> str | None:
    """Return why the uses that fitted a shape do not fit another one, or None if they do.

    `either`: the tested version may have a function where a coroutine function is fine, too.
    """
    if before in _READABLE and now in _READABLE:
        stored = next((use.where for use in uses if use.how == "stores"), None)
        return f"{stored} assigns to it" if now == "property" and stored else None
    old, new = signatures.from_text(before), signatures.from_text(now)
    if old is None or new is None:
        return "it is used as before"
    if old.is_async != new.is_async and not either:
        return "it is called as before"

    conflicts = [
        f"{use.where} {why}"
        for use in uses
        if (why := use.conflict(new, now)) is not None and why != use.conflict(old, before)
    ]
    return conflicts[0] if conflicts else None
