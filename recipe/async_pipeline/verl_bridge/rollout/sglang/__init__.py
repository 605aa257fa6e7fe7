# SPDX-License-Identifier: Apache-2.0
"""SGLang as a rollout engine. Importing this package does not import SGLang."""

import os

from . import cpu_stubs


def on_cpu() -> bool:
    """Return whether this process is to run on the CPU platform; imports neither torch nor verl."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


if on_cpu():
    cpu_stubs.on_import()
