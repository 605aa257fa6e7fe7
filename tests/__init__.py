# SPDX-License-Identifier: Apache-2.0
"""A regular package, so that no other `tests` on the path (verl ships one) is taken for it."""

import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FAKES = REPOSITORY / "tests" / "fakes"
HANG_S = 600.0
"""Seconds after which a wait that ends on success is a hang; a busy machine takes a fraction of it."""
OUTPUT = "ASYNC_PIPELINE_TEST_OUTPUT"
"""Environment variable with the file to which a test that runs a job writes the job's output at once."""


def tracked_files() -> list[str]:
    """Return the paths of all files that are tracked, or new and not ignored, relative to the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    # A file that was removed but not committed is still listed.
    return sorted(name for name in set(listed.stdout.splitlines()) if (REPOSITORY / name).is_file())
