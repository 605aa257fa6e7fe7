# SPDX-License-Identifier: Apache-2.0
"""Compose and resolve a configuration in less time: verl's has 40 files and 150 interpolations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import yaml


@cache
def with_libyaml(get_yaml_loader: Callable[[], Any]) -> Callable[[], Any]:
    """Return OmegaConf's `get_yaml_loader`, whose loader reads with libyaml where PyYAML has it."""

    @cache
    def loader() -> Any:
        stock = get_yaml_loader()
        if not yaml.__with_libyaml__:
            return stock
        from yaml.cyaml import CParser

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
