# SPDX-License-Identifier: Apache-2.0
"""Refuse settings of `strategy=megatron` that verl, Megatron or the CPU platform would fail on.

Without these checks a run ends in its workers, minutes after the start. `config.checks.batch_sizes` checks
that the parallel sizes divide the devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ...config.checks.refusals import (
    Refusal,
    Settings,
    any_of,
    check_all,
    must_be,
    must_be_off,
    must_be_on,
    never,
    off,
    refuse,
)
from ...config.derived.adapters import adapter_rank
from ...config.keys.aliases import BYPASS
from ...errors import ConfigError
from .model_rules import EXPERTS, MODEL, described_model, has_experts, has_reference

ACTOR, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
SIZES = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
"""The words before `_parallel_size`."""
REPLAY = ".megatron.router_replay.mode"
"""R2 records the routing while old log-probs are computed and replays it in the update."""
_WHOLE_SEQUENCES = "the attention of the CPU platform does not split a sequence"


def _on_a_cpu(name: str, *allowed: Any, why: str) -> Refusal:
    where = f"on the CPU platform, since {why}"
    return must_be(f".megatron.{name}", *allowed, remedy="leave it out, or use a GPU", where=where)


RULES: tuple[Refusal, ...] = (
    must_be_on(".megatron.use_mbridge", "verl's engine requires it"),
    must_be_off(".megatron.qat.enable", "quantization-aware training is not supported yet"),
    must_be_off(
        ".megatron.vanilla_mbridge",
        "only Megatron-Bridge exports adapters: set it",
        "with LoRA",
        lambda at: adapter_rank(at.config),
    ),
    Refusal(
        f"{MODEL}.lora_rank",
        off,
        f"must be 0 with strategy=megatron, which reads {MODEL}.lora.rank",
        "set the latter",
        when=lambda at: not at[f"{MODEL}.lora.rank"],
    ),
)
"""Paths that begin with a dot are below the section of an engine."""
CPU_ONLY: tuple[Refusal, ...] = (
    _on_a_cpu(
        "virtual_pipeline_model_parallel_size", None, 1, why="gloo mixes up the messages of its stages"
    ),
    _on_a_cpu("context_parallel_size", 1, why=_WHOLE_SEQUENCES),
    _on_a_cpu("dynamic_context_parallel", False, None, why=_WHOLE_SEQUENCES),
    _on_a_cpu("use_megatron_fsdp", False, None, why="it requires CUDA"),
    _on_a_cpu("vanilla_mbridge", False, None, why="it requires Transformer Engine"),
    _on_a_cpu("override_transformer_config.fp8", None, False, why="it requires Transformer Engine"),
    _on_a_cpu("override_transformer_config.fp4", None, False, why="it requires Transformer Engine"),
)
CPU_ONLY_OF_A_MODEL: tuple[Refusal, ...] = (
    must_be_off(
        ".use_fused_kernels",
        "leave it out, or use a GPU",
        "with Megatron on the CPU platform, since the kernels require CUDA",
    ),
)
NOT_REPLAYED: tuple[Refusal, ...] = (
    Refusal(REPLAY, never, "must be disabled", "only the actor's routing is replayed: leave it out"),
)
REPLAYED: tuple[Refusal, ...] = (
    Refusal(
        REPLAY,
        any_of("R2"),
        "must be disabled or R2",
        "the engines' routing is not recorded for each token and version: set R2, which replays the "
        "trainer's, or leave it out",
    ),
)
WITH_REPLAY: tuple[Refusal, ...] = (
    must_be_off(
        BYPASS,
        "the routing is recorded while old log-probs are computed: set it",
        "with router_replay.mode=R2",
    ),
    must_be_on(
        f"{MODEL}.use_remove_padding",
        "the routing is recorded for packed rows: set it",
        "with router_replay.mode=R2",
    ),
    must_be_off(
        ".megatron.pad_to_length",
        "the routing of padding is not recorded: set it",
        "with router_replay.mode=R2",
    ),
)


def check_megatron(config: DictConfig, *, critic: bool) -> None:
    """Raises ConfigError for settings of Megatron that cannot work."""
    sections = dict(_sections(config, critic=critic))
    strategy, ref = config.actor_rollout_ref.actor.strategy, config.actor_rollout_ref.ref.strategy
    check_all(
        *(partial(_check_engine, config, section, model) for section, model in sections.items()),
        *(partial(_require_same_sizes, config, next(iter(sections)), other) for other in [*sections][1:]),
    )
    if has_reference(config) and "megatron" in (strategy, ref) and strategy != ref:
        raise ConfigError(f"{REF}.strategy must equal {ACTOR}.strategy={strategy}, got {ref}; set it")


def _check_engine(config: DictConfig, section: str, model: str) -> None:
    check_all(
        lambda: _require_packages(section),
        lambda: refuse(RULES, Settings(config, section=section)),
        lambda: _check_replay(config, section),
        lambda: _check_warm_up(config, section),
        lambda: _check_pictures(config),
        lambda: _check_on_cpu(config, section, model) if config.trainer.device == "cpu" else None,
        lambda: _check_sizes(described_model(config), f"{section}.megatron", config),
    )


def _require_same_sizes(config: DictConfig, first: str, other: str) -> None:
    """Raises ConfigError if engines that share Megatron's process groups differ in their sizes."""
    for name in SIZES:
        paths = [f"{section}.megatron.{name}_parallel_size" for section in (first, other)]
        expected, got = (OmegaConf.select(config, path) for path in paths)
        if expected != got:
            raise ConfigError(
                f"{paths[1]} must equal {paths[0]}={expected}, got {got}, since models on the same devices "
                "share Megatron's process groups; set it"
            )


def _sections(config: DictConfig, *, critic: bool) -> Iterator[tuple[str, str]]:
    """Yield the sections whose engine is Megatron, each with the section of its model."""
    roles = [(ACTOR, MODEL)]
    roles += [(REF, MODEL)] if has_reference(config) else []
    roles += [(CRITIC, f"{CRITIC}.model")] if critic else []
    for section, model in roles:
        engine, sizes = (OmegaConf.select(config, f"{section}.{name}") for name in ("strategy", "megatron"))
        if engine == "megatron" and sizes is not None:
            yield section, model


def _require_packages(section: str) -> None:
    if find_spec("megatron") is None:
        raise ConfigError(
            f"{section}.strategy=megatron requires megatron-core and megatron-bridge, got neither; run "
            "`bash run_scripts/setup.sh`, or install them"
        )


def _check_on_cpu(config: DictConfig, section: str, model: str) -> None:
    refuse(CPU_ONLY, Settings(config, section=section))
    refuse(CPU_ONLY_OF_A_MODEL, Settings(config, section=model))
    if _experts_have_bias(config, f"{section}.megatron"):
        raise ConfigError(
            f"{MODEL}.path must be a model whose experts have no bias on the CPU platform, whose layers for "
            "experts have none; use another model, fsdp2, or a GPU"
        )


def _check_pictures(config: DictConfig) -> None:
    """Raises ConfigError if Megatron-Bridge could not make a model that takes pictures."""
    described = described_model(config)
    if "vision_config" not in described:
        return
    if config.trainer.device == "cpu":
        raise ConfigError(
            f"{MODEL}.path must be a model of text with Megatron on the CPU platform, where Megatron-Bridge "
            "makes no model that takes pictures; use fsdp2, or a GPU"
        )
    releases = [version(name) for name in ("megatron-bridge", "transformers")]
    bridge, reader = (tuple(int(part) for part in one.split(".")[:2]) for one in releases)
    if described.get("model_type") == "qwen2_5_vl" and bridge < (0, 4) and reader >= (5, 0):
        raise ConfigError(
            f"{MODEL}.path must be another model than Qwen2.5-VL, whose sizes Megatron-Bridge {releases[0]} "
            f"does not find with transformers {releases[1]}; use fsdp2, Qwen3-VL or another release"
        )


def _check_replay(config: DictConfig, section: str) -> None:
    """Raises ConfigError if recorded routing could not be replayed for every token.

    R2 records the routing while old log-probs are computed and replays it in the update.
    """
    at, described = Settings(config, section=section), described_model(config)
    mode = at[REPLAY]
    if mode in (None, "disabled"):
        return
    refuse(REPLAYED if section == ACTOR else NOT_REPLAYED, at)
    if described and not has_experts(described):
        raise ConfigError(
            f"{at.absolute(REPLAY)} must be disabled for a model without experts, got {mode!r}; leave it out"
        )
    refuse(WITH_REPLAY, at)


def _check_warm_up(config: DictConfig, section: str) -> None:
    """Raises ConfigError if the learning rate would not be warm before its schedule ends."""
    optimizer, total = f"{section}.optim", "trainer.total_training_steps"
    source = f"{optimizer}.lr_decay_steps"
    steps = OmegaConf.select(config, source)
    if steps is None:
        source, steps = total, OmegaConf.select(config, total)
    warm = OmegaConf.select(config, f"{optimizer}.lr_warmup_steps")
    if isinstance(warm, int) and isinstance(steps, int) and warm >= steps:
        raise ConfigError(
            f"{optimizer}.lr_warmup_steps must be < {source}={steps} with Megatron, got {warm}; lower it"
        )


def _experts_have_bias(config: DictConfig, megatron: str) -> bool:
    described = described_model(config)
    text = described.get("text_config") or described
    added = OmegaConf.select(config, f"{megatron}.override_transformer_config.add_bias_linear")
    return has_experts(described) and bool(added or text.get("model_type") == "gpt_oss")


def _check_sizes(described: Mapping[str, Any], megatron: str, config: DictConfig) -> None:
    """Raises ConfigError if the model cannot be divided as Megatron's sizes say."""
    text = described.get("text_config") or described
    for name, of_model, what in (
        ("tensor", "num_attention_heads", "attention heads"),
        ("tensor", "num_key_value_heads", "query groups"),
        ("pipeline", "num_hidden_layers", "layers"),
        ("expert", "num_experts", "experts"),
    ):
        path = f"{megatron}.{name}_model_parallel_size"
        if name == "expert":
            # The name depends on the model, and on the transformers that saved it.
            of_model = next((key for key in EXPERTS if text.get(key)), of_model)
        size, number = OmegaConf.select(config, path), text.get(of_model)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{path} must be >= 1, got {size!r}; leave it out for 1")
        uneven = name == "pipeline" and _uneven(config, megatron)
        if isinstance(number, int) and number > 0 and number % size and not uneven:
            raise ConfigError(
                f"{path} must divide the model's {number} {what} ({of_model} of its config.json), got "
                f"{size}; correct it"
            )
        if name == "expert" and size > 1 and not number and text:
            raise ConfigError(
                f"{path} must be 1 for a model without experts, got {size}; leave it out, or use a "
                "mixture of experts"
            )


def _uneven(config: DictConfig, megatron: str) -> bool:
    """Return whether the user distributes the layers over the stages."""
    fields = OmegaConf.select(config, f"{megatron}.override_transformer_config") or {}
    return any("pipeline" in str(name) for name in fields)


def makes_adapters() -> bool:
    """Return whether the installed Megatron-Bridge can make adapters, without importing it."""
    bridge = find_spec("megatron.bridge") if find_spec("megatron") else None
    if bridge is None or bridge.origin is None:
        return False
    made_in = Path(bridge.origin).parent / "peft" / "utils.py"
    return made_in.is_file() and "def create_peft(" in made_in.read_text(encoding="utf-8")
