# SPDX-License-Identifier: Apache-2.0
"""Check the programs of `agentic.agent` and `agentic.verify` before a run starts."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...agents.runners import is_function
from ...errors import ConfigError
from ..knobs.agentic import EXTERNAL, AgenticConfig, GatewayConfig
from ..paths import RUNTIME, hint
from .user_classes import check_function

PACKAGES = ("starlette", "uvicorn")
INTERPRETER = re.compile(r"python[\d.]*|bash|sh|dash|zsh|node")
FLAGS = re.compile(r"-[a-zA-Z]+")
ARGUMENT_FOLLOWS = frozenset("cemorWX")
"""Options of interpreters after which the first word is something else than a script."""
VERIFY = f"{AgenticConfig.PATH}.verify"
CLOSE = 0.8
"""How much a program must resemble a word to be suggested: PATH has thousands of them."""
HIDDEN = (
    f"{RUNTIME}.run_dir",
    "trainer.default_local_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "data.train_files",
    "data.val_files",
    "data.cache_dir",
)
"""Keys of what agents must not read: the ground truth of the data, what was played before, checkpoints."""
GIVEN = 2
"""Arguments of an agent that is a function: the task and the policy."""


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
        check_function(agentic.agent, path, GIVEN)
    else:
        values[path] = runnable(agentic.agent, path)
    if agentic.verify is not None:
        values[VERIFY] = runnable(agentic.verify, VERIFY)
    return values


def hidden_paths(value_of: Callable[[str], Any], agentic: AgenticConfig) -> list[str]:
    """Return which files and folders of a run the commands of its agents do not see in their sandbox.

    `value_of` returns the value of a key, or None.
    """
    found = list(agentic.sandbox_hidden)
    for key in HIDDEN:
        value = value_of(key)
        paths = [value] if isinstance(value, str) else value or ()
        found += [path for path in paths if "://" not in path]  # a URL is no file here
    return found


def runnable(command: str, path: str) -> str:
    """Return a command with its program and its files as absolute paths.

    `path`: the key, for errors. Raises ConfigError if its program, or the script that an interpreter is to
    run, does not exist.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(
            f"{path} must be a command, got {command!r} ({error}); correct its quotes"
        ) from None
    program = shutil.which(words[0]) if words else None
    if program is None:
        raise ConfigError(_no_program(command, words, path))
    script = _script(words)
    if script is not None and not Path(script).exists():
        where = Path(script).absolute()
        others = [one.name for one in where.parent.iterdir()] if where.parent.is_dir() else []
        raise ConfigError(
            f"{path} must be a command whose files exist, got {command!r}, but there is no file {where}"
            f"{hint(where.name, others)}; correct it"
        )
    files = [str(Path(word).absolute()) if _is_path(word) else word for word in words[1:]]
    return shlex.join([str(Path(program).absolute()), *files])


def _no_program(command: str, words: Sequence[str], path: str) -> str:
    """Return why the first word of a command is no program."""
    only = path == VERIFY
    kinds = "a command" if only else f"module:function, {EXTERNAL} or a command"
    wrong = f"{path} must be {kinds} whose program exists, got {command!r}"
    if not words:
        return f"{wrong}; correct it"
    file = Path(words[0])
    if file.is_file():
        run = f", or write 'python {words[0]}'" if file.suffix == ".py" else ""
        return f"{wrong}, a file that is not executable; chmod +x {words[0]}{run}"
    if only and is_function(command):
        return f"{wrong}, a function; write a command that runs it"
    own = hint(words[0], () if only else (EXTERNAL,)) or hint(words[0], _programs(words[0]), CLOSE)
    return f"{wrong}{own}; correct it"


def _is_path(word: str) -> bool:
    """Return whether a word is a file, or a folder that is written as a path: `docs` is a word too."""
    return Path(word).is_file() or (os.sep in word and Path(word).exists())


def _script(words: Sequence[str]) -> str | None:
    """Return the file that an interpreter is to run, or None if it is not obvious."""
    if INTERPRETER.fullmatch(Path(words[0]).name) is None:
        return None
    for word in words[1:]:
        if not word.startswith("-"):
            return word
        if FLAGS.fullmatch(word) is None or ARGUMENT_FOLLOWS & set(word):
            return None
    return None


def _programs(name: str) -> list[str]:
    """Return the names of programs where one of this name would be."""
    folder = os.path.dirname(name)
    folders = [folder] if folder else os.environ.get("PATH", "").split(os.pathsep)
    found = [one.name for place in map(Path, folders) if place.is_dir() for one in place.iterdir()]
    return [os.path.join(folder, one) for one in found]
