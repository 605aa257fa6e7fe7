# SPDX-License-Identifier: Apache-2.0
"""Keep engines from kernels of experts for which they reorder published weights.

Except on Hopper, vLLM and SGLang prefer FlashInfer's kernels for experts in bfloat16, and exchange and
shuffle rows for them after a load. The served weights could then be neither proved nor updated in place.
With adapters, the base keeps the weights of its files, and vLLM chooses its kernels without reading the
argument; they may reorder the base, which is not published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from ...config.derived.adapters import publishes_adapters
from ...errors import ConfigError
from .sglang_rules import EXPERTS

ROLLOUT = "actor_rollout_ref.rollout"
ARGUMENT = {"vllm": "moe_backend", "sglang": "moe_runner_backend"}
"""The engines' argument that names the kernels of experts."""
KERNELS = "triton"
REORDERING = "flashinfer"
"""Begins the names of the kernels that require reordered weights."""


def check_expert_kernels(config: DictConfig, described: Mapping[str, Any]) -> None:
    """Raises ConfigError if the user chose kernels of experts that require reordered weights.

    `described` is the model's `config.json`.
    """
    path, chosen = _chosen(config)
    if (
        chosen is not None
        and not publishes_adapters(config)
        and _is_concerned(config, described)
        and str(chosen).replace("-", "_").startswith(REORDERING)
    ):
        raise ConfigError(
            f"{path} must leave the rows of experts in their order, got {chosen!r}, for which the engine "
            f"reorders them after each load; use {KERNELS}"
        )


def set_expert_kernels(config: DictConfig, described: Mapping[str, Any]) -> str | None:
    """Set the kernels of experts unless the user has; return a line for the user, or None without news.

    `described` is the model's `config.json`.
    """
    path, chosen = _chosen(config)
    if not _is_concerned(config, described):
        return None
    automatic = chosen in (None, "auto")
    if publishes_adapters(config):
        return None if automatic else f"{path}={chosen} has no effect with adapters that are not merged"
    if not automatic:
        return None
    with open_dict(config):
        OmegaConf.update(config, path, KERNELS, force_add=True)
    return f"{path}={KERNELS}: other kernels of experts may reorder the published weights"


def _chosen(config: DictConfig) -> tuple[str, Any]:
    """Return the path of the engine's argument, and what the user set it to."""
    section = f"{ROLLOUT}.engine_kwargs.{config.actor_rollout_ref.rollout.name}"
    argument = ARGUMENT.get(config.actor_rollout_ref.rollout.name, "")
    for key, value in (OmegaConf.select(config, section) or {}).items():
        if str(key).replace("-", "_") == argument:
            return f"{section}.{key}", value
    return f"{section}.{argument}", None


def _is_concerned(config: DictConfig, described: Mapping[str, Any]) -> bool:
    """Return whether the engine may choose such kernels."""
    rollout = config.actor_rollout_ref.rollout
    quantized = rollout.get("quantization") is not None
    return not quantized and bool(expert_kernels(rollout.name, config.trainer.device, described))


def expert_kernels(engine: str, device: str, described: Mapping[str, Any]) -> dict[str, str]:
    """Return the argument that an engine needs for a model that is not quantized; empty if it needs none.

    `described` is the model's `config.json`.
    """
    text = described.get("text_config") or described
    if (
        engine not in ARGUMENT
        or device == "cpu"
        or not any(text.get(name) for name in EXPERTS)
        # Both engines have special kernels for its biases and its activation.
        or text.get("model_type") == "gpt_oss"
    ):
        return {}
    return {ARGUMENT[engine]: KERNELS}
