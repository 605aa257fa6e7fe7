# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline verify-gpu`: show within minutes what of this package works on a machine."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from ...console import EXIT_OK, EXIT_OURS, echo
from ...errors import ConfigError
from ...processes import adopt_orphans
from ..bench.machine import machine
from ..gpu_kit.catalogue import STEPS
from ..gpu_kit.page import as_json, in_words, report_page
from ..gpu_kit.steps import FAILED, PASSED, Options, lacking, run_steps
from ..tasks.build import ToySpec, ensure_toy
from .task import DEFAULT_ROOT

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
"""The repository's; `bench.workload` has it too, but needs packages, as nothing here may."""
NAMES = tuple(step.name for step in STEPS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline verify-gpu`."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument(
        "--gpus", type=int, default=None, metavar="N", help="devices to use (default: all; with cpu: two)"
    )
    parser.add_argument(
        "--model", default=None, metavar="PATH", help="a checkpoint for the jobs (default: a toy model)"
    )
    parser.add_argument(
        "--only", default=None, metavar="A,B,...", help=f"steps to run, of {', '.join(NAMES)} (default: all)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("outputs") / "verify",
        metavar="DIR",
        help="directory of gpu_report.{html,json} and the output of each step (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the steps and write the report. Returns 1 if a step failed or none ran.

    Raises ConfigError if an option is invalid or there is no such device.
    """
    chosen = NAMES if args.only is None else tuple(args.only.split(","))
    if odd := [name for name in chosen if name not in NAMES]:
        raise ConfigError(f"--only must name steps of {', '.join(NAMES)}, got {odd[0]!r}; correct it")
    found = count_devices(args.device)
    if not found:
        raise ConfigError(
            f"no CUDA device was found{_torch_in_words()}; run this on a machine with one, or use "
            "--device cpu"
        )
    devices = found if args.gpus is None else args.gpus
    if args.gpus is not None and not 1 <= args.gpus <= found:
        raise ConfigError(f"--gpus must be 1 to {found}, the devices that torch finds, got {args.gpus}")
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    adopt_orphans()  # so that a step leaves no process behind
    options = Options(
        device=args.device,
        devices=devices,
        model=args.model,
        configs=CONFIGS,
        task=lambda: ensure_toy(ToySpec(), DEFAULT_ROOT.resolve(), report=partial(echo, file=sys.stderr)).dir,
        folder=folder,
    )
    results = run_steps(STEPS, options, report=echo, chosen=chosen)
    facts = machine()
    written = json.dumps(as_json(facts, args.device, results), indent=1)
    (folder / "gpu_report.json").write_text(written + "\n", encoding="utf-8")
    (folder / "gpu_report.html").write_text(report_page(facts, args.device, results), encoding="utf-8")
    echo(f"{in_words(results)}; the report is {folder / 'gpu_report.html'}")
    statuses = {result.status for result in results}
    return EXIT_OK if PASSED in statuses and FAILED not in statuses else EXIT_OURS


def count_devices(device: str) -> int:
    """Return the number of CUDA devices that torch finds, or two for the CPU."""
    if device == "cpu":
        return 2
    if lacking(["torch"]):
        return 0
    import torch

    return int(torch.cuda.device_count())


def _torch_in_words() -> str:
    return f": torch is not installed for {sys.executable}" if lacking(["torch"]) else " by torch"
