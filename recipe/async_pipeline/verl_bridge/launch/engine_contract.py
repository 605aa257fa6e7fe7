# SPDX-License-Identifier: Apache-2.0
"""Refuse an engine that lacks something that the run uses, before Ray starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from ...config.derived.adapters import publishes_adapters
from ...config.paths import OWN
from ...errors import ConfigError
from ...installed.engines import EngineTree, installed, recorded_release
from ...installed.verl import patches_dir
from ..rules.model_rules import (
    described_model,
    has_experts,
    has_latent_attention,
    has_linear_attention,
    has_reordered_weights,
)

ROLLOUT = "actor_rollout_ref.rollout"


def check_engine(config: DictConfig, mode: str) -> str | None:
    """Compare the installed engine of the run with the contract. Returns a warning, or None if it fits.

    An engine with the files that this package is tested with fits. An engine need not be installed here,
    since only the nodes with replicas run it. If only the model decides whether it fits, and the model is not
    on this machine, the warning says so. Raises ConfigError if it does not fit and `mode` is not `warn`, or
    if verl itself cannot start it.
    """
    name = str(config.actor_rollout_ref.rollout.name)
    engine = next((engine for engine in installed() if engine.name == name), None)
    if engine is None or recorded_release(name).is_of(engine):
        return None
    return _compare(config, mode, engine)


def _compare(config: DictConfig, mode: str, engine: EngineTree) -> str | None:
    # A run with the tested files does without this package's tools.
    from ...tools.contract import engines

    name, contract = engine.name, engines.load(patches_dir())[engine.name]
    found = engines.breaking_runs(engine, contract, cpu=config.trainer.device == "cpu")
    described = described_model(config)
    unused = _unused(config, described)
    # What only the model decides about.
    in_doubt = unused if described else unused.union(engines.OF_MODELS)
    breaks = sorted(
        (one for one in found if not unused.issuperset(one.breaks)),
        key=lambda one: (not one.is_verls, in_doubt.issuperset(one.breaks)),
    )
    if not breaks:
        return None
    first, more = breaks[0], f" and {len(breaks) - 1} more" if len(breaks) > 1 else ""
    found_there = f"{first.name} {first.change}, which breaks {', '.join(first.breaks)}{more}"
    if in_doubt.issuperset(first.breaks):
        there = f"whose config.json is not on this machine: {config.actor_rollout_ref.model.path}"
        return f"{name} {engine.version}: {found_there}, if the model needs that, {there}"
    if mode == "warn" and not first.is_verls:
        return f"{name} {engine.version}: {found_there}; see `async-pipeline doctor --engine`"
    remedy = f"install {name} {contract.version}"
    raise ConfigError(
        f"{ROLLOUT}.name={name} requires a {name} with all that this package uses, got {engine.version}: "
        f"{found_there}; see `async-pipeline doctor --engine`, and {remedy}"
        + ("" if first.is_verls else f" or set {OWN}.engine_check=warn")
    )


def _unused(config: DictConfig, described: Mapping[str, Any]) -> set[str]:
    """Return what may break without effect on this run."""
    from ...tools.contract import engines

    plain = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))
    rollout = config.actor_rollout_ref.rollout
    unused = {
        engines.NOT_IN_RUNS: True,
        ("LoRA",): not publishes_adapters(plain),
        ("fp8",): rollout.quantization is None,
        ("replicas on several nodes",): rollout.tensor_model_parallel_size <= rollout.n_gpus_per_node,
        engines.EXPERTS: bool(described) and not has_experts(described),
        engines.LATENT: bool(described) and not has_latent_attention(described),
        engines.LINEAR: bool(described) and not has_linear_attention(described),
        engines.REORDERED: bool(described) and not has_reordered_weights(described),
    }
    return {name for names, is_unused in unused.items() if is_unused for name in names}
