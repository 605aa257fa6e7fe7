# SPDX-License-Identifier: Apache-2.0
"""Refuse models and options of the rollout engine to which published weights cannot be delivered.

Weights are published in the precision of the trainer, and an engine loads them as they are or, with
`rollout.quantization=fp8`, converted block by block. Where verl would convert them in another way, or load
them into a second model (a drafter), the engine would serve something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ...config.checks.refusals import Refusal, Settings, any_of, check_all, other_than, refuse
from ...config.derived.adapters import publishes_adapters
from ...config.placement import PLACED
from ...errors import ConfigError
from ...installed.engines import find_spec
from .diffusers_rules import draws_images
from .engine_arguments import check_arguments, check_engine_names, check_listed, check_replaced
from .expert_backends import check_expert_kernels
from .sglang_rules import check_sglang, check_sglang_adapters, check_sglang_on_cpu

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
ENGINE_ARGUMENTS = f"{ROLLOUT}.engine_kwargs.vllm"
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_UNQUANTIZED = "since weights are published unquantized"

REPLACED_ARGUMENTS = {
    "model": f"set {MODEL}.path instead",
    "dtype": f"set {ROLLOUT}.dtype instead",
    "cpu_offload_gb": "leave it out, since the pipeline serves weights on the device",
    "quantization": f"set {ROLLOUT}.quantization instead",
    "worker_extension_cls": "leave it out, since the pipeline's own extension loads and verifies weights",
    "load_format": f"set {ROLLOUT}.load_format instead",
    "enable_lora": f"set {MODEL}.lora_rank instead",
    "enable_expert_parallel": f"set {ROLLOUT}.expert_parallel_size instead",
    "mm_device_do_normalize": "leave it out, since the processor normalizes pictures, as for the trainer",
    "enable_eplb": "leave it out, since it moves experts between devices",
    "tensor_parallel_size": f"set {ROLLOUT}.tensor_model_parallel_size instead",
    "pipeline_parallel_size": "use tensor parallelism or more replicas instead",
    "data_parallel_size": "use more replicas instead",
    **dict.fromkeys(
        ("nnodes", "node_rank", "master_addr", "master_port"),
        "leave it out, since the nodes of a replica follow from its devices",
    ),
}
"""vLLM's arguments that would contradict what the pipeline knows about the engine, with the remedy."""
OWN_EXTENSIONS = "recipe.async_pipeline."
"""Extensions from here derive from the pipeline's own one, such as the benchmark's, which records steps."""

WEIGHTLESS_SPECULATION = ("ngram", "ngram_gpu", "suffix")
"""vLLM's methods of speculative decoding without weights."""

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head for which vLLM's CPU engine has a kernel."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in a model's config.json."""
REORDERED = ("llama4", "gpt_neox", "granitemoe")
"""How the types of the models begin whose layers `rollout/vllm/layout.py` declares as reordered."""
CPU_EXPERT_ALIGNMENT = 32
"""vLLM's CPU engine pads the width of experts to a multiple of this; padded experts cannot be updated."""


FP8: tuple[Refusal, ...] = (
    Refusal(
        f"{ROLLOUT}.quantization",
        other_than("fp8"),
        "must be null on the CPU platform",
        "vLLM's CPU engine needs AMX and a repacking that verl does not do: leave it out, or use a GPU",
        when=lambda at: at["trainer.device"] == "cpu",
    ),
    Refusal(
        f"{ROLLOUT}.quantization",
        other_than("fp8"),
        "must be null for LoRA adapters that are not merged, since the base is loaded without a conversion",
        f"leave it out, or set {MODEL}.lora.merge=True",
        when=lambda at: publishes_adapters(at.config),
    ),
)
ON_CPU: tuple[Refusal, ...] = (
    Refusal(
        f"{ROLLOUT}.expert_parallel_size",
        any_of(None, 1),
        "must be 1 on the CPU platform",
        "use tensor parallelism, since vLLM's CPU engine does not start with another value",
    ),
)


def has_critic(config: DictConfig) -> bool:
    """Return whether verl will use a critic. verl's own function warns if it will not."""
    if config.critic.enable is not None:
        return bool(config.critic.enable)
    return bool(config.algorithm.adv_estimator == "gae")


def has_reference(config: DictConfig) -> bool:
    """Return whether verl will use a reference policy. An update of images computes its KL without one."""
    in_loss = config.actor_rollout_ref.actor.use_kl_loss and not draws_images(config)
    return bool(config.algorithm.get("use_kl_in_reward", False) or in_loss)


def placed_roles(config: DictConfig, *, bypass: bool) -> list[str]:
    """Return the stages that a run has devices for; `bypass`: verl takes log-probs from the rollout."""
    absent = (
        (set() if has_critic(config) else {"critic"})
        | ({"logp"} if bypass else set())
        | (set() if has_reference(config) else {"ref_logp"})
    )
    return [role for role in PLACED if role not in absent]


def check_model(config: DictConfig) -> None:
    """Raises ConfigError if the rollout engine cannot serve published weights of this model."""
    described, engine = described_model(config), str(config.actor_rollout_ref.rollout.name)
    text, on_cpu = text_model(described), config.trainer.device == "cpu"
    checks: dict[str, tuple[Callable[[], object], ...]] = {
        "sglang": (
            lambda: check_sglang(config),
            lambda: check_expert_kernels(config, described),
            lambda: check_sglang_adapters(config, text),
            lambda: check_sglang_on_cpu(config, text) if on_cpu else None,
        ),
        "vllm": (
            lambda: _check_engine_arguments(OmegaConf.select(config, ENGINE_ARGUMENTS) or {}),
            lambda: check_expert_kernels(config, described),
            lambda: _check_fp8(config, described),
            lambda: _check_cpu_engine(config, described) if on_cpu else None,
        ),
    }
    check_all(
        lambda: _check_precision(config, described),
        lambda: _check_heads(config, described),
        lambda: _check_pictures(config, described),
        lambda: _check_context(config, described),
        lambda: check_engine_names(OmegaConf.select(config, f"{ROLLOUT}.engine_kwargs") or {}, engine),
        lambda: check_listed(engine, config.actor_rollout_ref.rollout),
        *checks.get(engine, ()),  # `diffusers_rules` knows the knobs too
    )


def described_model(config: DictConfig) -> Mapping[str, Any]:
    """Return the model's `config.json`, or nothing if it is not on this machine; the checks are then
    skipped.

    Raises ConfigError if the file is not JSON.
    """
    model = config.actor_rollout_ref.model
    return description_of(str(model.get("hf_config_path") or model.path))


def description_of(path: str) -> Mapping[str, Any]:
    """Return the `config.json` of a model, as `described_model` does."""
    here = Path(path).expanduser() / "config.json"
    file = here if here.is_file() else cached_config(path)
    if file is None:
        return {}
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{MODEL}.path must name a model, got {path!r}, whose config.json cannot be read: "
            f"{' '.join(str(error).split())}; correct it"
        ) from None
    return described if isinstance(described, Mapping) else {}


def cached_config(name: str) -> Path | None:
    """Return the `config.json` of a model of the Hub, or None if it is not in the Hub's cache."""
    if not HUB_NAME.fullmatch(name):
        return None
    # Imports httpx, which takes longer than most checks.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(file) if isinstance(file, str) else None


def _check_engine_arguments(arguments: Mapping[str, Any]) -> None:
    extension = str(arguments.get("worker_extension_cls"))
    own = {"worker_extension_cls"} if extension.startswith(OWN_EXTENSIONS) else set()
    replaced = {name: remedy for name, remedy in REPLACED_ARGUMENTS.items() if name not in own}
    check_all(
        lambda: check_replaced("vllm", arguments, replaced),
        lambda: _check_weights(arguments),
        lambda: check_arguments("vllm", arguments),
    )


def _check_weights(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for a drafter with weights, or a quantization in the model's overrides."""
    for key, value in arguments.items():
        name = str(key).replace("-", "_")
        if name == "speculative_config" and value:
            method = _as_mapping(value).get("method")
            if method not in WEIGHTLESS_SPECULATION:
                raise ConfigError(
                    f"{ENGINE_ARGUMENTS}.{key} must use a method without weights "
                    f"({', '.join(WEIGHTLESS_SPECULATION)}), got {method!r}; the weights of a drafter "
                    "would not be updated"
                )
        if name == "hf_overrides" and "quantization_config" in _as_mapping(value):
            raise ConfigError(
                f"{ENGINE_ARGUMENTS}.{key} must not have a quantization_config, got {value!r}; leave it "
                f"out, {_UNQUANTIZED}"
            )


def _as_mapping(value: Any) -> Mapping[str, Any]:
    """Return an option of vLLM that may be given as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, Mapping) else {}


def _check_precision(config: DictConfig, described: Mapping[str, Any]) -> None:
    """Raises ConfigError if the model is quantized: in its files, or by an override."""
    override = _as_mapping(OmegaConf.select(config, f"{MODEL}.override_config"))
    override = _as_mapping(override.get("model_config")) or override
    if override.get("quantization_config"):
        raise ConfigError(
            f"{MODEL}.override_config must not have a quantization_config, got "
            f"{override['quantization_config']!r}; leave it out, {_UNQUANTIZED}"
        )
    for section in (described, text_model(described)):
        if section.get("quantization_config"):
            method = _as_mapping(section["quantization_config"]).get("quant_method", "unknown")
            raise ConfigError(
                f"{MODEL}.path must name an unquantized model, got {config.actor_rollout_ref.model.path!r} "
                f"with quant_method {method!r}; convert it to bfloat16, {_UNQUANTIZED}"
            )


def _check_heads(config: DictConfig, described: Mapping[str, Any]) -> None:
    """Raises ConfigError if the devices of a replica cannot share the heads of the attention."""
    size, text = config.actor_rollout_ref.rollout.tensor_model_parallel_size, text_model(described)
    heads = text.get("num_attention_heads")
    if isinstance(size, int) and isinstance(heads, int) and size > 1 and heads % size:
        raise ConfigError(
            f"{ROLLOUT}.tensor_model_parallel_size must divide the model's {heads} attention heads "
            f"(num_attention_heads of its config.json), got {size}; correct it"
        )


def _check_pictures(config: DictConfig, described: Mapping[str, Any]) -> None:
    """Raises ConfigError if nothing here could make the processor of a model that takes pictures."""
    if "vision_config" in described and find_spec("torchvision") is None:
        raise ConfigError(
            f"{MODEL}.path must name a model of text where torchvision cannot be imported, got "
            f"{config.actor_rollout_ref.model.path!r} with a vision_config; install the torchvision that "
            "matches your torch, or use another model"
        )


def _check_context(config: DictConfig, described: Mapping[str, Any]) -> None:
    """Raises ConfigError if the context of the engine or the model is too short for a prompt and response."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "diffusers":
        return
    lengths = [OmegaConf.select(config, f"data.max_{part}_length") for part in ("prompt", "response")]
    for part, length in zip(("prompt", "response"), lengths, strict=True):
        if isinstance(length, int) and isinstance(own := rollout[f"{part}_length"], int) and own > length:
            raise ConfigError(
                f"{ROLLOUT}.{part}_length must be at most data.max_{part}_length={length}, got {own}; "
                "leave it out"
            )
    override = OmegaConf.select(config, f"{MODEL}.override_config.max_position_embeddings")
    of_model = override or described.get("max_position_embeddings")
    of_model = of_model or text_model(described).get("max_position_embeddings")
    of_engine = rollout.max_model_len
    if isinstance(of_model, int) and isinstance(of_engine, int) and of_engine > of_model:
        raise ConfigError(
            f"{ROLLOUT}.max_model_len must be at most {of_model}, the model's max_position_embeddings, got "
            f"{of_engine}; lower it"
        )
    limit = of_model if of_engine is None else of_engine
    if isinstance(limit, int) and all(isinstance(one, int) for one in lengths) and sum(lengths) > limit:
        whose = "the model's max_position_embeddings" if of_engine is None else f"{ROLLOUT}.max_model_len"
        raise ConfigError(
            f"data.max_prompt_length + max_response_length must be at most {limit}, {whose}, got "
            f"{lengths[0]} + {lengths[1]} = {sum(lengths)}; lower one of them"
            + ("" if of_engine is None else f", or set {ROLLOUT}.max_model_len={sum(lengths)}")
        )


def _check_fp8(config: DictConfig, described: Mapping[str, Any]) -> None:
    """Raises ConfigError if an engine that serves fp8 would miss converted weights or use older ones."""
    refuse(FP8, Settings(config))
    if config.actor_rollout_ref.rollout.quantization != "fp8":
        return
    if text_model(described).get("kv_lora_rank"):
        raise ConfigError(
            f"{ROLLOUT}.quantization must be null for a model with latent attention (kv_lora_rank in its "
            "config.json), got 'fp8', with which vLLM decodes with dequantized copies of the first weights; "
            "leave it out, so that bfloat16 is served"
        )


def _check_cpu_engine(config: DictConfig, described: Mapping[str, Any]) -> None:
    """Raises ConfigError if vLLM's CPU engine would fail at its start, or could not be updated."""
    refuse(ON_CPU, Settings(config))
    text, path = text_model(described), f"{MODEL}.path"
    got = f"got {config.actor_rollout_ref.model.path!r} with"

    head = _head_size(text)
    if head is not None and head not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"{path} must have attention heads of {', '.join(map(str, CPU_HEAD_SIZES))} on the CPU "
            f"platform, {got} {head}; use another model, or a GPU"
        )
    if text.get("index_topk"):
        raise ConfigError(
            f"{path} must not use sparse attention on the CPU platform, {got} index_topk="
            f"{text['index_topk']!r}; use another model, or a GPU"
        )

    if text.get("model_type") == "nemotron_h" and has_experts(text):
        raise ConfigError(
            f"{path} must have experts with a gate on the CPU platform, {got} model_type='nemotron_h'; use "
            "another model, or a GPU"
        )
    width, tp = _expert_width(text), config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if width is not None and width % (CPU_EXPERT_ALIGNMENT * max(1, tp)):
        raise ConfigError(
            f"{path} must have experts whose width, divided by {ROLLOUT}.tensor_model_parallel_size={tp}, is "
            f"a multiple of {CPU_EXPERT_ALIGNMENT} on the CPU platform, {got} {width}; use another model, "
            "or a GPU"
        )


def has_experts(described: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a mixture of experts."""
    text = text_model(described)
    if text.get("model_type") == "nemotron_h":  # its files name a number of experts without any, too
        blocks, pattern = (text.get(name) for name in ("layers_block_type", "hybrid_override_pattern"))
        return "moe" in (blocks or ()) or "E" in (pattern or "")
    return any(text.get(name) for name in EXPERTS)


def has_latent_attention(described: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes attention over compressed keys and values."""
    return bool(text_model(described).get("kv_lora_rank"))


def has_linear_attention(described: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes layers with a state instead of keys and values."""
    return any(name.startswith(("linear_", "mamba_")) for name in text_model(described))


def has_reordered_weights(described: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a model whose weights vLLM reorders."""
    return str(text_model(described).get("model_type")).startswith(REORDERED)


def text_model(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the description of the language model, also of a model that reads pictures as well."""
    return _as_mapping(described.get("text_config")) or described


def _head_size(text: Mapping[str, Any]) -> int | None:
    """Return the size of an attention head as vLLM computes it, or None if it has another form."""
    if text.get("kv_lora_rank"):
        return None
    hidden, heads, size = (text.get(name) for name in ("hidden_size", "num_attention_heads", "head_dim"))
    if isinstance(size, int) and size > 0:
        return size
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        return hidden // heads
    return None


def _expert_width(text: Mapping[str, Any]) -> int | None:
    """Return the intermediate size of an expert, or None without experts."""
    if not has_experts(text):
        return None
    width = text.get("moe_intermediate_size") or text.get("intermediate_size")
    return width if isinstance(width, int) else None
