# SPDX-License-Identifier: Apache-2.0
"""Whether this process may start others with their own mounts and network."""

from __future__ import annotations

import subprocess
from functools import cache


@cache
def may_unshare() -> bool:
    """Return whether new namespaces are allowed; they require root."""
    command = ["unshare", "-m", "-n", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
