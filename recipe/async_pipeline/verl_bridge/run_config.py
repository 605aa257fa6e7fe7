# SPDX-License-Identifier: Apache-2.0
"""Our two sections of verl's config, parsed: what the user set, and what the launch decided."""

from __future__ import annotations

from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from ..config.paths import OWN, RUNTIME, nested
from ..config.runtime import RuntimeConfig
from ..config.schema import AsyncPipelineConfig


def knobs_of(config: DictConfig) -> AsyncPipelineConfig:
    """The user's knobs. Parse them once per object: a config is too slow to be asked per response."""
    return AsyncPipelineConfig.of(_plain(config, OWN))


def runtime_of(config: DictConfig) -> RuntimeConfig:
    """The state of the run."""
    return RuntimeConfig.of(nested({RUNTIME: _plain(config, RUNTIME)}))


def _plain(config: DictConfig, path: str) -> dict[str, Any]:
    return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.select(config, path), resolve=True))
