# SPDX-License-Identifier: Apache-2.0
"""Check the programs of `agentic.agent` and `agentic.verify` before a run starts."""

from __future__ import annotations

import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

from ..agents.runners import is_function
from ..errors import ConfigError
from .agentic import EXTERNAL, AgenticConfig, GatewayConfig
from .user_classes import find_module

PACKAGES = ("starlette", "uvicorn")


def program_values(agentic: AgenticConfig) -> dict[str, str]:
    """Return the values of the keys that name commands or folders, by path, with files as absolute paths.

    Commands run in the folders of their episodes, so a relative path would lead nowhere. Raises ConfigError
    if there is no such function or program, or a package is missing.
    """
    path = f"{AgenticConfig.PATH}.agent"
    if agentic.agent is None:
        return {}
    if any(find_spec(name) is None for name in PACKAGES):
        raise ConfigError(f"{path} requires {', '.join(PACKAGES)}; pip install async_pipeline[agentic]")
    values = {}
    if agentic.agent == EXTERNAL:
        folder = Path(agentic.gateway.runners_dir or "").expanduser().absolute()
        values[f"{GatewayConfig.PATH}.runners_dir"] = str(folder)
    elif is_function(agentic.agent):
        find_module(agentic.agent, path)
    else:
        values[path] = runnable(agentic.agent, path)
    if agentic.verify is not None:
        where = f"{AgenticConfig.PATH}.verify"
        values[where] = runnable(agentic.verify, where)
    return values


def runnable(command: str, path: str) -> str:
    """Return a command with its program and its files as absolute paths. Raises ConfigError if it has none.

    `path`: the key, for errors.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(
            f"{path} must be a command, got {command!r} ({error}); correct its quotes"
        ) from None
    program = shutil.which(words[0]) if words else None
    if program is None:
        raise ConfigError(
            f"{path} must be module:function or a command whose program exists, got {command!r}; correct it"
        )
    files = [str(Path(word).absolute()) if Path(word).exists() else word for word in words[1:]]
    return shlex.join([str(Path(program).absolute()), *files])
