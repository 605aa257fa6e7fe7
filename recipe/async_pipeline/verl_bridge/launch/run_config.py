# SPDX-License-Identifier: Apache-2.0
"""Read our two sections of verl's config (knobs, state of the run) and Ray's address; change keys of it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ...config.checks.machine import require_machine
from ...config.derived.adapters import arena_bytes
from ...config.derived.runtime import RuntimeConfig
from ...config.derived.sample_store import store_budget
from ...config.derived.scheduling import OpenRequests
from ...config.keys.entry_points import EntryPoint, rewritten
from ...config.knobs.schema import AsyncPipelineConfig
from ...config.paths import OWN, RUNTIME, nested, select
from ...config.placement import Placement
from ...errors import ConfigError

INIT = "ray_kwargs.ray_init"
ADDRESS = f"{INIT}.address"
VARIABLE = "RAY_ADDRESS"
LOCAL, AUTO = "local", "auto"
LATEST = "latest"
"""Name of the link to the run directory that was made last."""


def knobs_of(config: DictConfig) -> AsyncPipelineConfig:
    """Parse the user's knobs. Call this once per object: it is too slow for every response."""
    return AsyncPipelineConfig.of(_plain(config, OWN))


def open_requests_of(config: DictConfig) -> OpenRequests:
    """Return how many requests and groups may be open at once."""
    rollout, knobs = config.actor_rollout_ref.rollout, knobs_of(config)
    return OpenRequests.of(
        knobs,
        engine_slots=rollout.max_num_seqs * rollout.data_parallel_size,
        workers=rollout.agent.num_workers,
        groups_per_step=config.data.train_batch_size,
        responses_per_group=rollout.n + knobs.agentic.redundancy,
    )


def runtime_of(config: DictConfig) -> RuntimeConfig:
    """Parse the state of the run."""
    return RuntimeConfig.of(nested({RUNTIME: _plain(config, RUNTIME)}))


def copy_of(config: DictConfig) -> DictConfig:
    """Return a deep copy. `copy.deepcopy` takes seven times as long for a configuration of verl."""
    return cast("DictConfig", pickle.loads(pickle.dumps(config)))


def resolved_of(config: DictConfig) -> dict[str, Any]:
    """Return a section as plain values.

    Raises ConfigError if an interpolation such as ${oc.env:NAME} has no value.
    """
    try:
        return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))
    except OmegaConfBaseException as error:
        text = str(error).splitlines()[0]
        raise ConfigError(
            f"{error.full_key} cannot be resolved: {text}; set it or override the key"
        ) from None


def address_to_join(config: DictConfig) -> str | None:
    """Return the address of the cluster that the user asks to join, or None to start a new one."""
    given, environment = OmegaConf.select(config, ADDRESS), os.environ.get(VARIABLE)
    # As in Ray: the variable replaces `auto` and a missing address.
    address = environment if environment and given in (None, AUTO) else given
    return None if address in (None, LOCAL) else str(address)


def notes_on_machine(
    config: Mapping[str, Any], knobs: AsyncPipelineConfig, *, planning: bool
) -> tuple[str, ...]:
    """Return a line for each thing of this machine that a run with this resolved config may do without.

    Raises ConfigError with what it needs, unless it is planned: then that is a line, too.
    """
    try:
        return require_machine(
            needed_shm_bytes=arena_bytes(config),
            store_bytes=store_budget(config, knobs).nbytes,
            temporary=select(config, f"{INIT}._temp_dir"),
        )
    except ConfigError as error:
        if not planning:
            raise
        return tuple(f"WARNING: on this machine {problem}" for problem in error.problems)


def run_dir_of(config: DictConfig, knobs: AsyncPipelineConfig) -> Path:
    """Return the run directory. Raises ConfigError if the names of the run would lead to another run's."""
    if knobs.run_dir:
        return Path(knobs.run_dir).resolve()
    names = {name: str(config.trainer[name] or "") for name in ("project_name", "experiment_name")}
    for key, name in names.items():
        parts = name.split("/")
        if not set(parts).isdisjoint({"", ".", ".."}):
            raise ConfigError(
                f"trainer.{key} must name a folder below outputs, got {name!r}; set another name, or "
                f"{OWN}.run_dir"
            )
    if Path(names["experiment_name"]).name == LATEST:
        raise ConfigError(
            f"trainer.experiment_name must not be {LATEST}, the link to the newest run, got "
            f"{names['experiment_name']!r}; set another name"
        )
    return Path("outputs", *names.values()).resolve()


def update(config: DictConfig, values: Mapping[str, Any]) -> None:
    """Set keys, also ones that the config lacks."""
    for path, value in values.items():
        OmegaConf.update(config, path, value, force_add=True)


def set_pool_sizes(config: DictConfig, placement: Placement) -> None:
    """Set verl's numbers of training and rollout devices from the pools."""
    for role, path in (("train", "trainer"), ("generate", "actor_rollout_ref.rollout")):
        pool = placement.pool_of(role)
        assert pool is not None
        update(config, {f"{path}.nnodes": len(pool.per_node), f"{path}.n_gpus_per_node": pool.per_node[0]})


def remove_keys(config: DictConfig, paths: Iterable[str]) -> None:
    """Remove keys, and sections that are empty afterwards: verl's dataclasses would not accept them."""
    for path in paths:
        parent, _, leaf = path.rpartition(".")
        node = OmegaConf.select(config, parent) if parent else config
        if isinstance(node, DictConfig) and leaf in node:
            del node[leaf]
            if parent and not node:
                remove_keys(config, (parent,))


def apply_entry_point(config: DictConfig, entry: EntryPoint) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Rewrite a configuration of an entry point into one of main_ppo.

    Returns a line for each key, and one for each key that has a wrong value or no meaning here.
    """
    try:
        raw = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))
    except OmegaConfBaseException:
        return (), ()  # the checks name the value that cannot be resolved
    found = rewritten(raw, entry)
    with open_dict(config):
        remove_keys(config, found.removed)
        update(config, found.values)
    return found.notes, found.problems


class ReadOnce:
    """A view of a config that looks each key up once.

    OmegaConf takes some ten microseconds for each key, and verl reads the same keys for each request.
    """

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name == "_config" or name.startswith("__"):  # not unpickled yet, or a protocol of Python's
            raise AttributeError(name)
        value = getattr(self._config, name)
        value = ReadOnce(value) if isinstance(value, DictConfig) else value
        setattr(self, name, value)
        return value


def _plain(config: DictConfig, path: str) -> dict[str, Any]:
    return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.select(config, path), resolve=True))


@cache
def with_libyaml(get_yaml_loader: Callable[[], Any]) -> Callable[[], Any]:
    """Return OmegaConf's `get_yaml_loader`, whose loader reads with libyaml where PyYAML has it."""

    @cache
    def loader() -> Any:
        stock = get_yaml_loader()
        if not yaml.__with_libyaml__:
            return stock
        from yaml.cyaml import CParser  # type: ignore[import-untyped]

        class Loader(CParser, stock):  # type: ignore[misc, valid-type]
            def __init__(self, stream: Any) -> None:
                CParser.__init__(self, stream)
                yaml.constructor.SafeConstructor.__init__(self)
                yaml.resolver.Resolver.__init__(self)

        return Loader

    return loader


@cache
def parsed_once(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return OmegaConf's `parse`, which keeps the tree of each interpolation; nothing changes a tree."""
    return lru_cache(maxsize=4096)(parse)
