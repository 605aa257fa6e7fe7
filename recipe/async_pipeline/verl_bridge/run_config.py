# SPDX-License-Identifier: Apache-2.0
"""Parse our two sections of verl's config: the user's knobs and the state of the run."""

from __future__ import annotations

from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from ..config.paths import OWN, RUNTIME, nested
from ..config.runtime import RuntimeConfig
from ..config.schema import AsyncPipelineConfig


def knobs_of(config: DictConfig) -> AsyncPipelineConfig:
    """Parse the user's knobs. Call this once per object: it is too slow for every response."""
    return AsyncPipelineConfig.of(_plain(config, OWN))


def runtime_of(config: DictConfig) -> RuntimeConfig:
    """Parse the state of the run."""
    return RuntimeConfig.of(nested({RUNTIME: _plain(config, RUNTIME)}))


def _plain(config: DictConfig, path: str) -> dict[str, Any]:
    return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.select(config, path), resolve=True))
