# SPDX-License-Identifier: Apache-2.0
"""Have FSDP train with torch's attention where flash-attn, verl's default, is not installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from ...config.checks.divisibility import SHARDED
from ...errors import ConfigError
from ..rules.model_rules import description_of, has_critic, has_linear_attention, has_reference, text_model

ATTENTION = "override_config.attn_implementation"
"""Below a model."""
FLASH = "flash_attention_2"
"""verl's default."""
INSTEAD = "packed_sdpa"
"""Registered by `packed_sequences`. transformers refuses a name with `sdpa` for models that cannot use it."""
LIMIT = "attn_logit_softcapping"
ULYSSES = {
    "actor_rollout_ref.actor": (
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
    ),
    "actor_rollout_ref.ref": (
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
        "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size",
    ),
    "critic": ("critic.fsdp.ulysses_sequence_parallel_size",),
}
"""The keys by which a role divides sequences; verl lets the first one that is above 1 win."""
PACKAGES = {
    FLASH: ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
    "flash_attention_4": ("flash_attn", "flash-attn-4"),
}
"""The module and the package of each flash attention."""
OF_VERL = ("qwen2_vl", "qwen2_5_vl", "glm4v", "kimi_vl")
"""Models of pictures whose attention verl replaces, for packed sequences, by its own call of flash-attn."""
EXCHANGING = ("qwen3_5", "qwen3_5_moe")
"""Models whose linear attention verl replaces by one that exchanges tokens between ranks."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model that FSDP trains, or computes log-probs with."""

    path: str
    """Of its section, such as `critic.model`."""
    attention: str | None
    """As the user has set it."""
    described: Mapping[str, Any]
    """Its `config.json`."""
    packed: bool
    sequence: Mapping[str, int]
    """The sizes above 1 over which the roles of the model divide sequences, by key."""

    @property
    def key(self) -> str:
        """Return the key of its attention."""
        return f"{self.path}.{ATTENTION}"

    @property
    def limit(self) -> Any:
        """Return the limit of its attention scores, if it has one."""
        return text_model(self.described).get(LIMIT)


def check_attention(config: DictConfig) -> None:
    """Raises ConfigError if a model would be computed with an attention that is wrong for it, without an
    error.

    verl exchanges heads between the ranks of a sequence in `_flash_attention_forward` alone; with another
    attention, ranks attend within their part of the sequence.
    """
    if faults := [fault for model in _trained(config) for fault in _faults(model)]:
        raise ConfigError(*faults)


def set_attention(config: DictConfig) -> list[str]:
    """Choose the attention of the trained models unless the user has or flash-attn is installed.

    Returns lines for the user.
    """
    if config.trainer.device != "cuda":
        return []
    trained = _trained(config)
    if needs := [line for model in trained if (line := _need(model))]:
        return needs
    unset = [model.key for model in trained if model.attention is None and _is_missing(FLASH)]
    with open_dict(config):
        for key in unset:
            OmegaConf.update(config, key, INSTEAD, force_add=True)
    # The critic's is chosen for the same reason.
    return [
        f"{key}={INSTEAD}: flash-attn is not installed here; install it, or set {key}, to choose"
        for key in unset[:1]
    ]


def _trained(config: DictConfig) -> list[Trained]:
    roles = {
        "actor_rollout_ref.actor": True,
        "actor_rollout_ref.ref": has_reference(config),
        "critic": has_critic(config),
    }
    sizes: dict[str, dict[str, int]] = {}
    for section, paths in ULYSSES.items():
        if roles[section] and OmegaConf.select(config, f"{section}.strategy") in SHARDED:
            model = "critic.model" if section == "critic" else "actor_rollout_ref.model"
            sizes.setdefault(model, {}).update(_sequence(config, paths))
    return [_described(config, model, sequence) for model, sequence in sizes.items()]


def _described(config: DictConfig, model: str, sequence: Mapping[str, int]) -> Trained:
    section = OmegaConf.select(config, model)
    return Trained(
        path=model,
        attention=OmegaConf.select(config, f"{model}.{ATTENTION}") or None,
        described=description_of(str(section.get("hf_config_path") or section.path)),
        packed=bool(section.get("use_remove_padding")),
        sequence=sequence,
    )


def _sequence(config: DictConfig, paths: tuple[str, ...]) -> dict[str, int]:
    """Return the size that divides the sequences of a role, by its key, if it is above 1."""
    for path in paths:
        size = OmegaConf.select(config, path)
        if isinstance(size, int) and size > 1:
            return {path: size}
    return {}


def _faults(model: Trained) -> Iterator[str]:
    attention = model.attention or FLASH
    # Kernels of the Hub are called as flash-attn is.
    if not (attention in PACKAGES or "/" in attention):
        for path, size in model.sequence.items():
            yield (
                f"{path} must be 1 with {model.key}={attention}, with which ranks would attend within their "
                f"part of a sequence, got {size}; set it to 1, or the attention to {FLASH}"
            )
    elif has_linear_attention(model.described) and model.described.get("model_type") not in EXCHANGING:
        for path, size in model.sequence.items():
            yield (
                f"{path} must be 1 for a model with linear attention, whose state verl does not pass between "
                f"ranks, got {size} with {model.described.get('model_type')!r}; set it to 1"
            )
    if model.limit and attention in ("sdpa", INSTEAD):
        yield (
            f"{model.key} must be {FLASH} or eager for a model with {LIMIT}={model.limit}, which torch's "
            f"attention ignores, got {attention!r}; set it"
        )


def _need(model: Trained) -> str | None:
    """Return a line if a model needs a package that is not installed here, or None."""
    attention = model.attention or FLASH
    own = model.described.get("model_type") in OF_VERL and (model.packed or model.sequence)
    if not _is_missing(attention if attention in PACKAGES else FLASH):
        return None

    users = [f"{path}={size}" for path, size in model.sequence.items()]
    if "vision_config" in model.described:
        users.append("a model of pictures")
    if model.limit:
        users.append(f"{LIMIT}={model.limit}")
    if model.attention:
        users = [f"{model.key}={attention}"] if attention in PACKAGES else ["a model of pictures"] * bool(own)
    if not users:
        return None

    package = PACKAGES.get(attention, PACKAGES[FLASH])[1]
    other = "" if own or not model.attention else f", or set {model.key}={INSTEAD}"
    return f"{users[0]} requires {package} to train; it is not installed here: install it on the nodes{other}"


def _is_missing(attention: str) -> bool:
    return find_spec(PACKAGES[attention][0]) is None
