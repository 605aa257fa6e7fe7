# SPDX-License-Identifier: Apache-2.0
"""Give engines the device memory that verl's default leaves to a trainer, which has its own devices here."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from ...config.derived.adapters import publishes_adapters
from ...config.keys.overrides import sets
from ...config.knobs.schema import AsyncPipelineConfig

ROLLOUT = "actor_rollout_ref.rollout"
SHARE = f"{ROLLOUT}.gpu_memory_utilization"
STANDALONE = f"{ROLLOUT}.standalone_gpu_memory_utilization"
"""The same for replicas with their own devices, in verl's fully asynchronous trainer."""
VERLS_DEFAULT = 0.5
SHARES = {"vllm": 0.85, "sglang": 0.8}
"""Of each device, for weights and KV cache; vLLM's includes activations and CUDA graphs."""
ARGUMENTS = {
    "vllm": ("gpu_memory_utilization", "kv_cache_memory_bytes"),
    "sglang": ("mem_fraction_static",),
}
"""The engines' own arguments about memory. The first is the share."""


def set_engine_memory(config: DictConfig, knobs: AsyncPipelineConfig, overrides: Sequence[str]) -> str | None:
    """Raise the engine's share of device memory unless the user chose one.

    `overrides` is the command line, where the user may have written verl's default. Returns a line for the
    user, or None if the share is the user's or the engine has none.
    """
    standalone = OmegaConf.select(config, STANDALONE)
    if standalone is not None:
        OmegaConf.update(config, SHARE, standalone)
        return f"{STANDALONE} -> {SHARE}={standalone}"

    engine = str(config.actor_rollout_ref.rollout.name)
    if (
        engine not in SHARES
        or config.trainer.device == "cpu"
        or OmegaConf.select(config, SHARE) != VERLS_DEFAULT
        or sets(overrides, SHARE)
    ):
        return None
    section = f"{ROLLOUT}.engine_kwargs.{engine}"
    for key, value in (OmegaConf.select(config, section) or {}).items():
        if value is not None and str(key).replace("-", "_") in ARGUMENTS[engine]:
            return None

    choose = f"set another value, or {section}.{ARGUMENTS[engine][0]}, to choose"
    if knobs.weight_sync.load_staging == "device" and not publishes_adapters(config):
        # The weights fit into one half of a device, so their copy fits into the other half.
        return f"{SHARE}={VERLS_DEFAULT}: the rest has room for load_staging=device; {choose}"
    OmegaConf.update(config, SHARE, SHARES[engine])
    return (
        f"{SHARE}={SHARES[engine]} instead of verl's default {VERLS_DEFAULT}: no trainer shares these "
        f"devices; {choose}"
    )
