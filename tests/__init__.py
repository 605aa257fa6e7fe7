# SPDX-License-Identifier: Apache-2.0
"""A regular package, so that no other `tests` on the path (verl ships one) is taken for it."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FAKES = REPOSITORY / "tests" / "fakes"
