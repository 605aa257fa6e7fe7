# SPDX-License-Identifier: Apache-2.0
"""Compose a configuration file of another system as its own launcher does, with overrides.

Hydra composes the defaults list, groups and packages; OmegaConf resolves `${a.b}`, `${oc.env:NAME}` and
`${now:FORMAT}`. A part that cannot be composed, such as a parent file that is not there, becomes a line of
`Composed.problems`; the rest is composed without it.
"""

from __future__ import annotations

import copy
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ...config.keys.foreign_keys import Document
from ...config.keys.overrides import explain_complaint
from ...errors import ConfigError

VERLS_PARENTS: Mapping[str, Mapping[str, Any]] = {
    "ppo_trainer": {},
    "ppo_megatron_trainer": {"model_engine": "megatron"},
}
"""verl's own configurations, and what choosing each of them sets. A run has their other values anyway."""
VERLS_FOLDERS = ("verl.trainer.config", "verl/trainer/config")
"""Ends of search paths of hydra where verl's own configurations are."""
VERLS_SECTIONS = ("actor_rollout_ref", "algorithm", "critic", "data", "reward", "trainer")
MOST_PARENTS = 100
"""Parents that a file may lack."""
_NO_SUCH_GROUP = re.compile(r"Could not override '(.+?)'")
_REFERENCE = re.compile(r"\$\{\s*([A-Za-z_][\w.\-]*)\s*\}")


class Composed(NamedTuple):
    """A composed configuration."""

    document: dict[str, Any]
    """Plain values. A value that cannot be resolved is its interpolation, as text."""
    variables: frozenset[str] = frozenset()
    """Paths that interpolations refer to."""
    problems: tuple[str, ...] = ()
    """One line for each part that is not composed."""


def composed(file: Path | None, overrides: Sequence[str] = (), group: str = "") -> Composed:
    """Compose a file with overrides, or the overrides alone.

    The keys of a file in a folder that is called `group` belong into the section of that name. Raises
    ConfigError if the file or an override cannot be read.
    """
    if file is None:
        with tempfile.TemporaryDirectory() as folder:
            empty = Path(folder) / "overrides.yaml"
            empty.touch()
            return composed(empty, overrides)
    own = _own_hydra_section(file)
    in_group = bool(group) and file.resolve().parent.name == group and group not in OmegaConf.load(file)
    root = file.resolve().parent.parent if in_group else file.resolve().parent
    name = f"{group}/{file.stem}" if in_group else file.stem

    parsed, problems = _parsed(overrides, root)
    arguments = [_argument(override, root) for override in parsed if not _deletes_value(override, root)]
    arguments.append(f"hydra.searchpath=[{','.join(_search_paths(own))}]")
    config, missing = _composed(file, root, name, arguments)
    with open_dict(config):
        for override in parsed:
            if _deletes_value(override, root) and not _delete(config, override.key_or_group):
                problems.append(_nothing_to_delete(override.key_or_group))
        for parent in missing:
            values = VERLS_PARENTS.get(parent.rpartition("/")[2])
            if values is None:
                problems.append(f"{parent}: no file {root / parent}.yaml; its keys are not translated")
            for key, value in (values or {}).items():
                config.setdefault(key, value)

    variables = frozenset(_references(OmegaConf.to_container(config, resolve=False)))
    document = _resolved(config, "", problems)
    if own:
        document["hydra"] = own
    return Composed(document, variables, tuple(problems))


def _own_hydra_section(file: Path) -> dict[str, Any]:
    """Return the file's section for hydra itself, as text. Raises ConfigError if the file cannot be read."""
    if file.suffix != ".yaml":
        raise ConfigError(f"{file} must be a file of hydra, which end in .yaml; rename it")
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except (OSError, YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{file} must be a mapping of keys, got a {type(loaded).__name__}")
    own = loaded.get("hydra")
    return {str(key): value for key, value in own.items()} if isinstance(own, dict) else {}


def _search_paths(own: Document) -> list[str]:
    """Return the file's search paths without verl's, whose thousand keys a run has anyway."""
    paths = own.get("searchpath")
    return [str(path) for path in paths or () if not str(path).endswith(VERLS_FOLDERS)]


def _composed(file: Path, root: Path, name: str, arguments: list[str]) -> tuple[DictConfig, list[str]]:
    """Return the configuration, and the parents that are not there, which count as empty.

    Raises ConfigError if hydra refuses the file or an override.
    """
    missing = list[str]()
    try:
        with _hydra(root) as store, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while True:
                try:
                    return compose(config_name=name, overrides=arguments), missing
                except MissingConfigException as error:
                    parent = str(error.missing_cfg_file or "").removesuffix(".yaml").strip("/")
                    if not parent or parent in missing or len(missing) == MOST_PARENTS:
                        raise
                    missing.append(parent)
                    folder, _, option = parent.rpartition("/")
                    store.store(name=option, node={}, group=folder or None)
                except HydraException as error:
                    # A group that a missing parent would choose from.
                    found = _NO_SUCH_GROUP.match(str(error))
                    chosen = [text for text in arguments if found and text.startswith(f"{found[1]}=")]
                    if not chosen:
                        raise
                    arguments = [f"+{text}" if text in chosen else text for text in arguments]
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        first = str(error).split("\n")[0]
        raise ConfigError(f"{file}: {explain_complaint(first) or first}") from None


@contextmanager
def _hydra(root: Path) -> Iterator[ConfigStore]:
    """Start hydra on a folder, and leave its stored configurations as they were."""
    store = ConfigStore.instance()
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(root), version_base=None):
        # After the start, which stores configurations of hydra's plugins.
        before = copy.deepcopy(store.repo)
        try:
            yield store
        finally:
            store.repo = before


# Overrides.


def _parsed(overrides: Sequence[str], root: Path) -> tuple[list[Override], list[str]]:
    """Return the overrides that can be applied, and a line for each group that has no files.

    Raises ConfigError if an override cannot be parsed.
    """
    parsed, problems = list[Override](), list[str]()
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            first = str(error).split("\n")[0]
            raise ConfigError(explain_complaint(first) or f"{text}: {first}") from None
        if "/" in override.key_or_group and not _is_group(override, root):
            problems.append(f"{text}: no folder {root / override.key_or_group}; its keys are not translated")
        else:
            parsed.append(override)
    return parsed, problems


def _is_group(override: Override, root: Path) -> bool:
    return (root / override.key_or_group.lstrip("/")).is_dir()


def _deletes_value(override: Override, root: Path) -> bool:
    return override.is_delete() and not _is_group(override, root)


def _argument(override: Override, root: Path) -> str:
    """Return an override for hydra. A value may be for a parent that is not there, so it adds or replaces."""
    text = str(override.input_line)
    return text if _is_group(override, root) else f"++{text.lstrip('+')}"


def _nothing_to_delete(path: str) -> str:
    return f"~{path}: the file has no such key; if it is a key of verl's, add the override to the command"


def _delete(config: DictConfig, path: str) -> bool:
    """Delete a key. Returns whether it was there."""
    parent, _, name = path.rpartition(".")
    node = OmegaConf.select(config, parent, throw_on_resolution_failure=False) if parent else config
    if not isinstance(node, DictConfig) or name not in node:
        return False
    del node[name]
    return True


# Values.


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield from _REFERENCE.findall(node)
    elif isinstance(node, Mapping | list):
        for item in node.values() if isinstance(node, Mapping) else node:
            yield from _references(item)


def _resolved(node: DictConfig, prefix: str, problems: list[str]) -> dict[str, Any]:
    """Return plain values; values that cannot be resolved stay interpolations and are added to `problems`."""
    raw = OmegaConf.to_container(node, resolve=False)
    assert isinstance(raw, dict)
    values = dict[str, Any]()
    for name, text in raw.items():
        path = f"{prefix}{name!s}"
        try:
            value = text if text == "???" else node[name]
            if isinstance(value, DictConfig):
                value = _resolved(value, f"{path}.", problems)
            elif isinstance(value, ListConfig):
                value = OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            problems.append(f"{path}={text}: {_reason(error, text)}")
            value = text
        values[str(name)] = value
    return values


def _reason(error: OmegaConfBaseException, text: Any) -> str:
    references = list(_references(text))
    if references and all(reference.split(".")[0] in VERLS_SECTIONS for reference in references):
        return "it refers to a value of verl's own, and stays as it is"
    return f"{str(error).splitlines()[0]}; set it by an override"
