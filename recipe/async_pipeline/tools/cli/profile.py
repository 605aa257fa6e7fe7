# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline profile RUN`: extract a profile from a run, for `simulate` and `plan`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...console import echo
from ...errors import ConfigError
from ..plan.extraction import FIXED_SHARE, extract
from ..plan.profile import dump
from ..plan.run_log import read_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline profile`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the profile to FILE instead of printing it"
    )
    parser.add_argument(
        "--fixed-share",
        type=float,
        default=FIXED_SHARE,
        metavar="F",
        help="fraction of each stage's time that more devices do not reduce; one run cannot measure it "
        "(default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Extract and write the profile. Raises ConfigError if the run is unusable or FILE cannot be written."""
    if not 0 <= args.fixed_share <= 1:
        raise ConfigError(f"--fixed-share must be from 0 to 1, got {args.fixed_share}; 0.2 is the default")
    text = dump(extract(read_run(args.run), fixed_share=args.fixed_share))
    if args.out is None:
        echo(text.rstrip())
        return 0

    try:
        args.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--out {args.out} cannot be written: {error.strerror}; name another file"
        ) from None
    echo(f"profile written to {args.out}; `async-pipeline plan --profile {args.out} --devices N` is next")
    return 0
