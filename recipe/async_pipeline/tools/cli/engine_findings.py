# SPDX-License-Identifier: Apache-2.0
"""The findings of `async-pipeline doctor` about vLLM and SGLang, which are read and not imported."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipe.async_pipeline.contract import engines
from recipe.async_pipeline.contract.declared import ENGINES
from recipe.async_pipeline.patching import series

from .finding import Finding

COMMAND = "async-pipeline doctor --engine"
NOWHERE = "here"
"""The value of `--engine` without a folder."""


@dataclass(frozen=True, kw_only=True)
class EngineFinding(Finding):
    """Something that this package uses of an engine and that is missing or has changed."""

    name: str
    change: str
    used_by: tuple[str, ...]
    breaks: tuple[str, ...]


def examine_engines(root: Path | None) -> tuple[Finding, ...]:
    """Compare the engines below `root`, or the installed ones, with the contract.

    Returns a row for each engine, and one for each difference. Raises ContractError if `root` has no engine
    or a file of it cannot be parsed.
    """
    found = engines.installed() if root is None else engines.unpacked(root)
    if not found:
        detail = f"neither {' nor '.join(ENGINES)} is installed"
        return (Finding(subject="engine", verdict="fail", detail=detail, remedy="install one of them"),)
    contracts = engines.load(series.patches_dir())
    return tuple(
        finding for engine in found for finding in _rows(engines.compare(engine, contracts[engine.name]))
    )


def _rows(found: engines.EngineComparison) -> Iterator[Finding]:
    breaks = [one for one in found.differences if one.breaks_on(cpu=on_cpu())]
    number = len(found.differences)
    yield Finding(
        subject=found.engine.name,
        verdict="fail" if breaks else "ok",
        detail=f"{found.engine.version} at {found.engine.folder}; tested: {found.tested}; "
        f"{found.checked} compared, {number or 'no'} difference{'s' * (number != 1)}",
    )
    for one in found.differences:
        yield EngineFinding(
            subject=found.engine.name,
            verdict="fail" if one in breaks else "warn",
            detail=f"breaks {', '.join(one.breaks)}: {one.name} {one.change}; used by "
            f"{', '.join(one.used_by)}",
            remedy=f"use {found.engine.name} {found.tested}, or change the named files",
            name=one.name,
            change=one.change,
            used_by=one.used_by,
            breaks=one.breaks,
        )


def on_cpu() -> bool:
    """Return whether runs in this environment are on the CPU platform."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def check_versions(found: Sequence[engines.EngineTree], folder: Path) -> tuple[Finding, ...]:
    """Check for each engine that it is the tested version, or that it has all that this package uses.

    The contract is read from `folder`. It is a failure if runs with no engine could start.
    """
    contracts = engines.load(folder)
    breaks = {
        engine.name: engines.breaking_runs(engine, contracts[engine.name], cpu=on_cpu()) for engine in found
    }
    unusable = bool(breaks) and all(breaks.values())
    return tuple(
        _version(engine, contracts[engine.name], len(breaks[engine.name]), unusable=unusable)
        for engine in found
    )


def _version(
    engine: engines.EngineTree, contract: engines.EngineContract, number: int, *, unusable: bool
) -> Finding:
    if contract.is_of(engine):
        detail = f"{engine.name} {engine.version}, which this package is tested with"
        return Finding(subject="engine contract", verdict="ok", detail=detail)
    detail = f"{engine.name} {engine.version}; tested: {contract.version}; "
    if not number:
        return Finding(subject="engine contract", verdict="ok", detail=f"{detail}has all that runs use")
    return Finding(
        subject="engine contract",
        verdict="fail" if unusable else "warn",
        detail=f"{detail}{number} thing{'s' * (number != 1)} that runs use changed",
        remedy=f"`{COMMAND}` names them; runs with it need engine_check=warn",
    )
