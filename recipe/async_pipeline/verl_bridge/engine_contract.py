# SPDX-License-Identifier: Apache-2.0
"""Refuse an engine that lacks something that the run uses, before Ray starts."""

from __future__ import annotations

from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from ..config.adapters import publishes_adapters
from ..config.paths import OWN
from ..contract import engines
from ..contract.engines import Difference
from ..errors import ConfigError
from ..patching import series

ROLLOUT = "actor_rollout_ref.rollout"


def check_engine(config: DictConfig, mode: str) -> str | None:
    """Compare the installed engine of the run with the contract. Returns a warning, or None if it fits.

    The version that this package is tested with is not read. An engine need not be installed here, since only
    the nodes with replicas run it. Raises ConfigError if it does not fit and `mode` is not `warn`.
    """
    name = str(config.actor_rollout_ref.rollout.name)
    engine = next((engine for engine in engines.installed() if engine.name == name), None)
    if engine is None:
        return None
    contract = engines.load(series.patches_dir())[name]
    found = engines.breaking_runs(engine, contract, cpu=config.trainer.device == "cpu")
    breaks = [one for one in found if _concerns(config, one)]
    if not breaks:
        return None
    first, more = breaks[0], f" and {len(breaks) - 1} more" if len(breaks) > 1 else ""
    found_there = f"{first.name} {first.change}, which breaks {', '.join(first.breaks)}{more}"
    if mode == "warn":
        return f"{name} {engine.version}: {found_there}; see `async-pipeline doctor --engine`"
    raise ConfigError(
        f"{ROLLOUT}.name={name} requires a {name} with all that this package uses, got {engine.version}: "
        f"{found_there}; see `async-pipeline doctor --engine`, install {name} {contract.version}, or set "
        f"{OWN}.engine_check=warn"
    )


def _concerns(config: DictConfig, difference: Difference) -> bool:
    """Return whether a run uses at least one of the things that break."""
    plain = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))
    unused = {
        "LoRA": not publishes_adapters(plain),
        "fp8": config.actor_rollout_ref.rollout.quantization is None,
    }
    return not all(unused.get(name, name in engines.NOT_IN_RUNS) for name in difference.breaks)
