# SPDX-License-Identifier: Apache-2.0
"""Refuse options with which published weights cannot be delivered to SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ...config.checks.refusals import Refusal, Settings, any_of, check_all, must_be, refuse
from ...config.derived.adapters import publishes_adapters
from ...errors import ConfigError
from .engine_arguments import check_arguments, check_replaced

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
ARGUMENTS = f"{ROLLOUT}.engine_kwargs.sglang"

REPLACED = {
    "model_path": f"set {MODEL}.path instead",
    "dtype": f"set {ROLLOUT}.dtype instead",
    "quantization": "leave it out, since weights are published unquantized",
    "torchao_config": "leave it out, since weights are published unquantized",
    "lora_paths": f"set {MODEL}.lora_adapter_path instead",
    "load_format": f"set {ROLLOUT}.load_format instead",
    "enable_lora": f"set {MODEL}.lora_rank instead",
    "max_lora_rank": f"set {MODEL}.lora_rank instead",
    "lora_target_modules": f"set {MODEL}.target_modules instead",
    "custom_weight_loader": "leave it out, since the pipeline loads and verifies weights",
    "tp_size": f"set {ROLLOUT}.tensor_model_parallel_size instead",
    "pp_size": "use tensor parallelism or more replicas instead",
    "dp_size": "use more replicas instead",
    "enable_dp_attention": "use more replicas instead",
    "ep_size": "use tensor parallelism instead",
    "speculative_algorithm": "leave it out, since the weights of a drafter would not be updated",
    "disaggregation_mode": "leave it out, since it is not supported yet",
    "host": "leave it out, since the server listens on the loopback address only",
    "api_key": "leave it out, since verl's server of SGLang checks no key",
    "admin_api_key": "leave it out, since verl's server of SGLang would open more routes and check no key",
    "tokenizer_worker_num": "leave it out, since one process must know all requests",
    **dict.fromkeys(
        ("nnodes", "node_rank", "dist_init_addr"),
        "leave it out, since the nodes of a replica follow from its devices",
    ),
}
"""SGLang's arguments that would contradict what the pipeline knows about the engine, with the remedy."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
NEEDED_TOGETHER: Mapping[frozenset[str], tuple[str, ...]] = {
    frozenset(("q_proj", "k_proj", "v_proj")): ("q_proj", "v_proj"),
    frozenset(("gate_proj", "up_proj")): ("gate_proj",),
}
"""Modules that SGLang fuses, and the ones without which it does not serve adapters of the others."""

CPU_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
CPU_WIDTH_ALIGNMENT = 32
"""SGLang pads these sizes to a multiple of this for each rank on a CPU, and its tables do not say so."""


_WITH_SGLANG = f"with {ROLLOUT}.name=sglang"
RULES: tuple[Refusal, ...] = (
    Refusal(
        f"{ROLLOUT}.quantization", any_of(None), f"must be null {_WITH_SGLANG}", "leave it out, or use vllm"
    ),
    must_be(f"{ROLLOUT}.expert_parallel_size", 1, None, remedy="use tensor parallelism", where=_WITH_SGLANG),
)


def check_sglang(config: DictConfig) -> None:
    """Raises ConfigError if SGLang could not be given published weights, or would not start."""
    arguments = OmegaConf.select(config, ARGUMENTS) or {}
    check_all(
        lambda: check_replaced("sglang", arguments, REPLACED, _is_default),
        lambda: check_arguments("sglang", arguments),
        lambda: refuse(RULES, Settings(config)),
    )


def check_sglang_adapters(config: DictConfig, text: Mapping[str, Any]) -> None:
    """Raises ConfigError if SGLang could not serve the LoRA adapters that are trained.

    `text` is the language model's part of the model's config.json.
    """
    if not publishes_adapters(config):
        return
    if any(text.get(name) for name in EXPERTS):
        raise ConfigError(
            f"{MODEL}.lora.merge must be True with {ROLLOUT}.name=sglang and a mixture of experts, got "
            f"{OmegaConf.select(config, f'{MODEL}.lora.merge')!r}; set it, or use vllm for adapters"
        )
    modules = config.actor_rollout_ref.model.target_modules
    if isinstance(modules, str):
        if modules != "all-linear":
            raise ConfigError(
                f"{MODEL}.target_modules must be all-linear or a list of names with "
                f"{ROLLOUT}.name=sglang, got {modules!r}; correct it"
            )
        return
    names = {str(name).rpartition(".")[2] for name in modules or ()}
    for fused, required in NEEDED_TOGETHER.items():
        missing = [name for name in required if name not in names]
        if missing and names & fused:
            raise ConfigError(
                f"{MODEL}.target_modules must have {' and '.join(missing)} if it has "
                f"{' or '.join(sorted(names & fused))} with {ROLLOUT}.name=sglang, which fuses them, got "
                f"{list(modules)!r}; add {'it' if len(missing) == 1 else 'them'}"
            )


def check_sglang_on_cpu(config: DictConfig, text: Mapping[str, Any]) -> None:
    """Raises ConfigError if SGLang would pad the model, which it does on a CPU only.

    `text` is the language model's part of the model's config.json.
    """
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    unit_of = dict.fromkeys(CPU_WIDTHS, CPU_WIDTH_ALIGNMENT * size) | {"num_key_value_heads": size}
    for name, unit in unit_of.items():
        width = text.get(name)
        if isinstance(width, int) and width % unit:
            raise ConfigError(
                f"{MODEL}.path must have a {name} that is a multiple of {unit} with {ROLLOUT}.name=sglang "
                f"and {ROLLOUT}.tensor_model_parallel_size={size} on the CPU platform, got "
                f"{config.actor_rollout_ref.model.path!r} with {width}; use another model, or vllm"
            )


def _is_default(value: object) -> bool:
    """Return whether a value says what SGLang does anyway: a switch is off, or a size is at most 1."""
    return value is None or value is False or (type(value) is int and value in (0, 1))
