# SPDX-License-Identifier: Apache-2.0
"""Where results go, checked before anything runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ..errors import ConfigError


def check_outputs(json_file: Path | None, picture: Path | None, logs: Path | None) -> None:
    """Raises ConfigError: what is to be written at the end, hours from now, could not be."""
    for option, path in (("--json", json_file), ("--picture", picture)):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the picture needs matplotlib; `pip install matplotlib`, or leave out --json and --picture")
    if logs is not None and logs.exists() and any(logs.iterdir()):
        raise ConfigError(f"--logs {logs} is not empty; name another folder")
