# SPDX-License-Identifier: Apache-2.0
"""The command line of a run: composed by hydra as verl's entry point does, with a line for each unknown key.

hydra itself stops at the first one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from ...config.keys.entry_points import EntryPoint
from ...config.keys.misplaced import is_own, unknown_key
from ...config.keys.overrides import (
    explain_complaint,
    is_refused,
    sets,
    several_values,
    unknown_among,
    unknown_in,
)
from ...errors import ConfigError
from ...installed.verl import find_verl_root
from .. import replaced
from ..rules.config_checks import Checked, checked
from ..rules.spelling import inner_key, takes_no
from ..rules.verl_keys import engine_with, is_read, is_read_in, near_key
from .run_config import apply_entry_point


def check_command_line(
    arguments: Sequence[str], problems: tuple[str, ...] = (), entry: EntryPoint | None = None
) -> None:
    """Check the command line of verl's main_ppo, or of another entry point, before hydra reads it.

    `problems` are known already. The configurations of some entry points are not a part of verl.

    Raises ConfigError with all problems of the run if there are any of the command line, for which hydra may
    print a traceback; all else is left to hydra.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-path", "-cp", type=Path)
    parser.add_argument("--config-name", "-cn", default=entry.configs[0] if entry else "ppo_trainer")
    parser.add_argument("overrides", nargs="*")
    given, others = parser.parse_known_args(arguments)
    config = None
    folder = None if given.config_path is None else of_verls_entry_point(given.config_path, entry)
    if entry is not None and entry.folder is not None and folder is None:
        folder = find_verl_root() / "verl" / entry.folder
    if not others and (entry is None or folder is not None):
        with suppress(ConfigError):
            config, unknown = composed(folder, given.config_name, given.overrides)
            problems = (*unknown, *problems)
    if problems:
        if config is None:
            raise ConfigError(*problems)
        more = () if entry is None else apply_entry_point(config, entry)[1]
        checked_with((*problems, *more), config)


def of_verls_entry_point(folder: Path, entry: EntryPoint | None = None) -> Path:
    """Return a folder as hydra finds it: a relative path begins at the module that is started."""
    module = "verl.trainer.main_ppo" if entry is None else entry.module
    return find_verl_root().joinpath(*module.split(".")[:-1]) / folder


def composed(folder: Path | None, name: str, overrides: list[str]) -> tuple[DictConfig, tuple[str, ...]]:
    """Return the configuration as verl's entry point would see it, and a line for each word with an unknown
    key, an unknown file or a value that cannot be read, left out.

    Raises ConfigError if hydra refuses the configuration for another reason.
    """
    try:
        return _composed_by_hydra(folder, name, overrides), ()
    except (HydraException, ValueError) as error:
        unread = _unread(overrides)
        if not unread and not any(is_refused(word, str(error)) for word in overrides):
            raise _as_config_error(error) from None
    overrides = [word for word in overrides if word not in unread]
    # Without plain overrides there is no unknown key, and the rest shows which ones are.
    base, chosen, wrong = _with_choices(folder, name, [word for word in overrides if _chooses(word)])
    both = ((word, f"+{word}") for word in overrides)
    words = [
        plus if plus in chosen else word
        for word, plus in both
        if {word, plus} & {*chosen} or not _chooses(word)
    ]
    unknown = unknown_among(words, lambda path: _has(base, path))
    problems = tuple(_unknown(path, overrides) for path in dict.fromkeys(unknown.values()))
    # A key of this package only lacks its `+`: its value is checked with the rest.
    added = [f"+{word}" if is_own(unknown.get(word, "")) else word for word in words]
    try:
        config = _composed_by_hydra(folder, name, [word for word in added if word not in unknown])
    except (HydraException, ValueError) as error:
        raise _as_config_error(error) from None
    return config, (*unread.values(), *wrong, *problems)


def _unread(overrides: list[str]) -> dict[str, str]:
    """Return a line for each word that is no override, or that has several values, by the words."""
    parser, found = OverridesParser.create(), dict[str, str]()
    for word in overrides:
        key, _, value = word.partition("=")
        try:
            if parser.parse_override(word).is_sweep_override():
                found[word] = several_values(key, value)
        except (HydraException, ValueError) as error:
            found[word] = explain_complaint(str(error), word=word) or f"{word}: {str(error).splitlines()[0]}"
    return found


def _with_choices(
    folder: Path | None, name: str, words: list[str]
) -> tuple[DictConfig, list[str], list[str]]:
    """Return the configuration with choices of files and added keys, the words that hydra takes, and a line
    for each of the others.

    Raises ConfigError if hydra refuses the configuration for another reason.
    """
    problems = list[str]()
    while True:
        try:
            return _composed_by_hydra(folder, name, words), words, problems
        except (HydraException, ValueError) as error:
            left = [word for word in words if not is_refused(word, str(error))]
            if left == words:
                raise _as_config_error(error) from None
            path, refused = unknown_in(str(error)), [word for word in words if word not in left]
            added = [f"+{word}" for word in refused if word.partition("=")[0] == path and is_own(path)]
            words = [*left, *added]
            problems.append(str(_as_config_error(error)) if path is None else _unknown(path, left))


def _unknown(path: str, overrides: list[str]) -> str:
    near = near_key(path) or inner_key(path) or ""
    section = "" if "." in near else path.rpartition(".")[0]
    given = bool(near) and sets(overrides, f"{section}.{near}".lstrip("."))
    return unknown_key(
        path,
        None if given and path.endswith(f".{near}") else near or None,
        given=given,
        read=is_read(path) and is_read_in(*path.rpartition(".")[::2]),
        fixed=takes_no(path),
        engine=engine_with(path),
    )


def _has(config: Any, path: str) -> bool:
    """Return whether a configuration has a key, also one without a value, which `select` leaves out."""
    section, _, name = path.rpartition(".")
    found = OmegaConf.select(config, section) if section else config
    return isinstance(found, DictConfig) and name in found.keys()  # noqa: SIM118 - `in` leaves it out, too


def _chooses(word: str) -> bool:
    """Return whether a word adds a key, chooses a file or is hydra's own: the known keys depend on these."""
    key = word.partition("=")[0]
    return key.startswith(("+", "hydra.")) or "@" in key or "/" in key or "." not in key


def _as_config_error(error: Exception) -> ConfigError:
    return ConfigError(explain_complaint(str(error), near_key) or str(error).split("\n")[0])


def _composed_by_hydra(folder: Path | None, name: str, overrides: list[str]) -> DictConfig:
    replaced.apply("configuration")
    verl = find_verl_root() / "verl" / "trainer" / "config"
    GlobalHydra.instance().clear()
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--config-path must be a directory, got {str(folder)!r}")
    with initialize_config_dir(config_dir=str((folder or verl).resolve()), version_base=None):
        return compose(config_name=name, overrides=[f"hydra.searchpath=[file://{verl}]", *overrides])


def checked_with(
    problems: tuple[str, ...], config: DictConfig, *, absent: list[str] | None = None
) -> Checked:
    """Return what the checks of a run find. Raises ConfigError with `problems` and the new ones.

    `absent`: see `config_checks.checked`.
    """
    found = checked(config, problems, absent=absent)
    if found is None:
        off = "the pipeline is switched off; remove the override that does so"
        raise ConfigError(*(problems or (off,)))
    return found
