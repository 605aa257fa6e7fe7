# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline verify-gpu`: show within minutes what of this package works on a machine."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from ...console import EXIT_OK, EXIT_OURS, echo
from ...errors import ConfigError
from ...processes import adopt_orphans
from ..bench.measuring.machine import machine
from ..gpu_kit.catalogue import STEPS
from ..gpu_kit.page import as_json, in_words, report_page
from ..gpu_kit.steps import FAILED, PASSED, CheckStep, Options, lacking, run_steps
from ..tasks.build import ToySpec, ensure_toy
from .task import DEFAULT_ROOT

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
"""The repository's; `bench.workload` has it too, but needs packages, as nothing here may."""
NAMES = tuple(step.name for step in STEPS)
DEVICES = """\
A step whose modules are missing is not run, and the report says why. Steps that start a run need two
GPUs. The models are small, unless --model names another; the largest has 500 M parameters.

exit status: 0 passed, 1 a step failed or none ran, 2 user error"""


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
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    listed = "\n".join(map(_described, STEPS))
    parser.epilog = f"steps, each with its limit in minutes:\n{listed}\n\n{DEVICES}"


def _described(step: CheckStep) -> str:
    """Return what `--help` says of a step."""
    text = f"{step.shows}; needs {', '.join(step.needs) or 'nothing besides this package'}"
    head = f"  {step.name:<15}{step.limit_s / 60:>3.0f}  "
    return textwrap.fill(text, 98, initial_indent=head, subsequent_indent=" " * len(head))


def run(args: argparse.Namespace) -> int:
    """Run the steps and write the report. Returns 1 if a step failed or none ran.

    Raises ConfigError if an option is invalid, there is no such device or the folder cannot be created.
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
        counted = "the devices that torch finds" if args.device == "cuda" else "as --device is cpu"
        raise ConfigError(f"--gpus must be 1 to {found}, {counted}, got {args.gpus}")
    folder = args.out.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {args.out} cannot be created ({error.strerror}); name a writable folder"
        ) from None
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
    facts = {"date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC", **machine()}
    written = json.dumps(as_json(facts, args.device, results), indent=1)
    report = folder / "gpu_report.json"
    report.write_text(written + "\n", encoding="utf-8")
    if not lacking(["jinja2"]):
        report = folder / "gpu_report.html"
        report.write_text(report_page(facts, args.device, results), encoding="utf-8")
    echo(f"{in_words(results)}; the report is {report}")
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
