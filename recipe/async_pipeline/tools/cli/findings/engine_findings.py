# SPDX-License-Identifier: Apache-2.0
"""The findings of `async-pipeline doctor` about vLLM and SGLang, which are read and not imported."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipe.async_pipeline.installed.engines import ENGINES, EngineTree, installed
from recipe.async_pipeline.installed.verl import patches_dir
from recipe.async_pipeline.tools.contract import engines

from .finding import Finding
from .machine_findings import count_nvidia_devices

COMMAND = "async-pipeline doctor --engine"


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
    found = installed() if root is None else engines.unpacked(root)
    if not found:
        detail = f"neither {' nor '.join(ENGINES)} is installed"
        return (Finding(subject="engine", verdict="fail", detail=detail, remedy="install one of them"),)
    contracts = engines.load(patches_dir())
    # A tree may be meant for another machine.
    cpu = on_cpu(count_nvidia_devices()) if root is None else on_cpu()
    return tuple(
        finding
        for engine in found
        for finding in _rows(engines.compare(engine, contracts[engine.name]), cpu=cpu)
    )


def _rows(found: engines.EngineComparison, *, cpu: bool) -> Iterator[Finding]:
    breaks = [one for one in found.differences if one.breaks_on(cpu=cpu)]
    number = len(found.differences)
    yield Finding(
        subject=found.engine.name,
        verdict="fail" if breaks else "ok",
        detail=f"{found.engine.version} at {found.engine.folder}; tested: {found.tested}; "
        f"{found.checked} names compared, {number or 'no'} difference{'s' * (number != 1)}",
    )
    for one in found.differences:
        yield EngineFinding(
            subject=f"{found.engine.name} change",
            verdict="fail" if one in breaks else "warn",
            detail=f"breaks {', '.join(one.breaks)}: {one.name} {one.change}; used by "
            + ("verl" if one.is_verls else ", ".join(one.used_by)),
            remedy=_remedy(found, one),
            name=one.name,
            change=one.change,
            used_by=one.used_by,
            breaks=one.breaks,
        )


def _remedy(found: engines.EngineComparison, one: engines.Difference) -> str:
    name, tested = found.engine.name, found.tested
    if found.engine.version.partition("+")[0] == tested:
        return f"these are not the files of {name} {tested}: install it again, or change the named files"
    if one.is_verls:
        return f"use {name} {tested}, or a version that has it; no file of this package is concerned"
    return f"use {name} {tested}, or change the named files"


def on_cpu(num_gpus: int = 1) -> bool:
    """Return whether runs in this environment, on a machine with `num_gpus`, are on the CPU platform."""
    platform = os.environ.get("VERL_PLATFORM", "").strip().lower()
    return platform == "cpu" if platform else not num_gpus


def check_versions(found: Sequence[EngineTree], folder: Path, num_gpus: int) -> tuple[Finding, ...]:
    """Check for each engine that it has the tested files, or else all that this package uses.

    The contract is read from `folder`. It is a failure if no run could start with any engine.
    """
    contracts, cpu = engines.load(folder), on_cpu(num_gpus)
    breaks = {engine.name: engines.breaking_runs(engine, contracts[engine.name], cpu=cpu) for engine in found}
    unusable = bool(breaks) and all(
        any(not one.in_some_runs for one in of_engine) for of_engine in breaks.values()
    )
    return tuple(
        _version(engine, contracts[engine.name], breaks[engine.name], unusable=unusable) for engine in found
    )


def _version(
    engine: EngineTree,
    contract: engines.EngineContract,
    breaks: Sequence[engines.Difference],
    *,
    unusable: bool,
) -> Finding:
    if contract.is_of(engine):
        detail = f"{engine.name} {engine.version}, with the files that this package is tested with"
        return Finding(subject=f"{engine.name} contract", verdict="ok", detail=detail)
    number, starts = len(breaks), not any(one.is_verls for one in breaks)
    detail = f"{engine.name} {engine.version}; tested: {contract.version}; "
    if not number:
        return Finding(
            subject=f"{engine.name} contract", verdict="ok", detail=f"{detail}has all that runs use"
        )
    if all(one.in_some_runs for one in breaks):
        some = dict.fromkeys(name for one in breaks for name in one.breaks)
        return Finding(
            subject=f"{engine.name} contract",
            verdict="warn",
            detail=f"{detail}breaks only {', '.join(some)}",
            remedy=f"`{COMMAND}` names what is missing; runs with these need engine_check=warn",
        )
    return Finding(
        subject=f"{engine.name} contract",
        verdict="fail" if unusable else "warn",
        detail=f"{detail}{number} thing{'s' * (number != 1)} that runs use changed",
        remedy=f"`{COMMAND}` names them; "
        + ("runs with it need engine_check=warn" if starts else "verl cannot start it, so runs refuse it"),
    )
