# SPDX-License-Identifier: Apache-2.0
"""hydra's `instantiate` for one config that is instantiated again and again: resolved once, then only
called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

_SPECIAL = ("_recursive_", "_convert_", "_partial_", "_args_")


def hydra_with_factories(module: Any) -> Any:
    """Stands for the module `hydra` where only `hydra.utils.instantiate(config=..., **arguments)` is called.

    verl makes an agent loop for each answer, and hydra's own resolves and merges the config each time.
    """
    if isinstance(module, SimpleNamespace):
        return module
    factories: dict[int, tuple[Any, Callable[..., Any]]] = {}

    def instantiate(config: Any, **arguments: Any) -> Any:
        known = factories.get(id(config))
        if known is None:
            # The config is kept, so that no other one gets its id.
            known = factories[id(config)] = (config, factory_of(config))
        return known[1](**arguments)

    return SimpleNamespace(utils=SimpleNamespace(instantiate=instantiate))


def factory_of(config: Any) -> Callable[..., Any]:
    """Called with arguments, gives what `hydra.utils.instantiate(config, **arguments)` gives."""
    plain = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else dict(config)
    assert isinstance(plain, Mapping)
    if any(name in plain for name in _SPECIAL) or any(_has_target(value) for value in plain.values()):
        # Something below is to be made anew each time, too.
        return partial(hydra.utils.instantiate, config)
    # hydra hands mappings and lists over as configs of OmegaConf.
    own = {str(name): _as_config(value) for name, value in plain.items() if name != "_target_"}
    return partial(hydra.utils.get_object(str(plain["_target_"])), **own)


def _has_target(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" in value or any(map(_has_target, value.values()))
    return isinstance(value, list) and any(map(_has_target, value))


def _as_config(value: Any) -> Any:
    return OmegaConf.create(value) if isinstance(value, dict | list) else value
