# SPDX-License-Identifier: Apache-2.0
"""hydra's `instantiate` for a config that is instantiated repeatedly: resolved once, then only called."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from ..launch.run_config import ReadOnce

_SPECIAL = ("_recursive_", "_convert_", "_partial_", "_args_")


def hydra_with_factories(module: Any, copied: type | None = None) -> Any:
    """Return a replacement for the module `hydra` in which only `hydra.utils.instantiate(config=...)` is
    called.

    verl makes an agent loop for each response, and hydra resolves and merges the config each time. Objects
    of the class `copied` are copies of the first one with another `server_manager`: their other arguments
    are equal for all responses of a worker, and nothing else of them changes.
    """
    factories: dict[int, tuple[Any, Callable[..., Any]]] = {}

    def instantiate(config: Any, **arguments: Any) -> Any:
        known = factories.get(id(config))
        if known is None:
            # Keep the config, so that no other config gets its id.
            factory = factory_of(config)
            if copied is not None and isinstance(factory, partial) and factory.func is copied:
                factory = copies_of(factory)
            known = factories[id(config)] = (config, factory)
        return known[1](**arguments)

    return SimpleNamespace(utils=SimpleNamespace(instantiate=instantiate))


def hydra_of_agent_loops(module: Any) -> Any:
    """Return the replacement for `hydra` in verl's module of agent loops."""
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

    return hydra_with_factories(module, copied=SingleTurnAgentLoop)


def copies_of(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that copies what `factory` made at its first call, with another `server_manager`."""
    first: Any = None

    def make(*, server_manager: Any, **arguments: Any) -> Any:
        nonlocal first
        if first is None:
            first = factory(server_manager=server_manager, **arguments)
            first.rollout_config = ReadOnce(first.rollout_config)
        made = copy.copy(first)
        made.server_manager = server_manager
        return made

    return make


def factory_of(config: Any) -> Callable[..., Any]:
    """Return a function that gives what `hydra.utils.instantiate(config, **arguments)` gives."""
    plain = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else dict(config)
    assert isinstance(plain, Mapping)
    if any(name in plain for name in _SPECIAL) or any(_has_target(value) for value in plain.values()):
        # A nested object has to be instantiated each time, too.
        return partial(hydra.utils.instantiate, config)
    # hydra passes mappings and lists as OmegaConf configs.
    own = {str(name): _as_config(value) for name, value in plain.items() if name != "_target_"}
    return partial(hydra.utils.get_object(str(plain["_target_"])), **own)


def _has_target(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" in value or any(map(_has_target, value.values()))
    return isinstance(value, list) and any(map(_has_target, value))


def _as_config(value: Any) -> Any:
    return OmegaConf.create(value) if isinstance(value, dict | list) else value
