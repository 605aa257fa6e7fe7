# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine, loaded through the arena. Run as a script: MODEL_DIR MODE; prints one JSON object.

MODE `load`: publish other weights and compare what the engine then says with transformers; then let the
loader skip the embedding. MODE `repacked`: leave vLLM's CPU repack on. MODE `adapter`: publish LoRA adapters.
MODE `experts`: publish a mixture of experts, which is made and stored in MODEL_DIR.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, VLLM_LORA_PATH
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from recipe.async_pipeline.errors import AsyncPipelineError
from recipe.async_pipeline.verl_bridge.rollout.vllm.adapter import VllmAdapter
from recipe.async_pipeline.verl_bridge.rollout.vllm.worker import PipelineWorkerExtension
from recipe.async_pipeline.verl_bridge.workers.fsdp_shards import adapter_of, described, part_of, unfused
from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import encode
from tests import HANG_S
from tests.e2e.probed_engines import import_once

NAME = "recipe.async_pipeline.verl_bridge.rollout.vllm.worker.PipelineWorkerExtension"
PROMPT = [20, 21, 11, 22, 23, 29]


def changed(model: Any) -> dict[str, torch.Tensor]:
    """Other weights than those on disk, by published name; with tied embeddings without a head."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    tied = model.config.tie_word_embeddings
    return {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}


def replace_method(name: str, function: Callable[..., Any]) -> None:
    setattr(VllmAdapter, name, function)


def engine_says(llm: LLM, adapter: LoRARequest | None = None) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False, lora_request=adapter)
    return list(answers[0].outputs[0].token_ids)


def transformers_says(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    for _ in range(12):
        with torch.no_grad():
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    tokens: list[int] = ids[0, len(PROMPT) :].tolist()
    return tokens


def load(llm: LLM, manifest: bytes) -> dict[str, Any]:
    try:
        report, _ = llm.collective_rpc("load_snapshot", args=(manifest, 1 << 16))[0]
        return {"ok": report}
    except AsyncPipelineError as error:
        return {"error": type(error).__name__, "message": str(error)}


def forget_recording(worker: Any) -> None:
    getattr(worker, "worker", worker)._serving.adapter._recorded = None


def publish_adapters(model_dir: str) -> dict[str, Any]:
    """Three versions, each another adapter; then one whose tensors the engine gets in disorder."""
    llm = LLM(
        model_dir,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        worker_extension_cls=NAME,
        seed=0,
        enable_lora=True,
        max_loras=1,
        max_lora_rank=8,
    )
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules="all-linear"))
    writer = ArenaWriter(1 << 20, 1000, torch.float32)
    asked = LoRARequest(VLLM_LORA_NAME, VLLM_LORA_INT_ID, VLLM_LORA_PATH)
    report: dict[str, Any] = {"before": engine_says(llm), "loads": [], "engine": [], "transformers": []}

    def publish(version: int) -> dict[str, Any]:
        torch.manual_seed(version)
        tensors = adapter_of(model)
        for tensor in tensors.values():
            tensor.copy_(torch.randn_like(tensor) * 0.2)
        parts = [part_of(name, tensor) for name, tensor in tensors.items()]
        ticket = writer.gather_parts(version, parts, described(model.peft_config["default"]))
        assert ticket is not None
        return load(llm, encode(await_manifest(ticket, HANG_S)))

    for version in range(1, 4):
        report["loads"].append(publish(version))
        report["engine"].append(engine_says(llm, asked))
        report["transformers"].append(transformers_says(model))
    add_lora = VllmAdapter.load_adapter

    def in_disorder(self: Any, manifest: Any, config: str) -> None:
        published = VllmAdapter.published

        def swapped(self: Any, manifest: Any) -> dict[str, Any]:
            return {
                name.replace("up_proj", "?").replace("gate_proj", "up_proj").replace("?", "gate_proj"): tensor
                for name, tensor in published(self, manifest).items()
            }

        replace_method("published", swapped)
        add_lora(self, manifest, config)
        replace_method("published", published)

    replace_method("load_adapter", in_disorder)
    report["disorder"] = publish(4)
    writer.close()
    return report


def publish_experts(folder: str) -> dict[str, Any]:
    """Three versions of a small Qwen3 MoE, under the names that verl gives its experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    llm = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        worker_extension_cls=NAME,
        seed=0,
        skip_tokenizer_init=True,
    )
    writer = ArenaWriter(1 << 20, 1000, torch.float32)
    report: dict[str, Any] = {"loads": [], "engine": [], "transformers": []}
    for version in range(1, 4):
        weights = changed(model)
        parts = [p for n, w in weights.items() for p in unfused(part_of(n, w), "qwen3_moe")]
        ticket = writer.gather_parts(version, parts)
        assert ticket is not None
        report["loads"].append(load(llm, encode(await_manifest(ticket, HANG_S))))
        report["published"] = len(parts)
        report["engine"].append(engine_says(llm))
        report["transformers"].append(transformers_says(model))
    writer.close()
    return report


def main(model_dir: str, mode: str) -> dict[str, Any]:
    if mode == "experts":
        return publish_experts(model_dir)
    if mode == "adapter":
        return publish_adapters(model_dir)
    if mode == "repacked":
        setattr(PipelineWorkerExtension, "__new__", lambda cls, **kwargs: object.__new__(cls))  # noqa: B010
    llm = LLM(
        model_dir, dtype="float32", enforce_eager=True, max_model_len=64, worker_extension_cls=NAME, seed=0
    )
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    writer = ArenaWriter(1 << 20, 16, torch.float32)
    before = engine_says(llm)
    weights = changed(model)

    def publish(version: int, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
        return load(llm, encode(await_manifest(writer.gather(version, weights.items()), HANG_S)))

    report: dict[str, Any] = {"first": publish(1, weights)}
    report["before"], report["engine"], report["transformers"] = (
        before,
        engine_says(llm),
        transformers_says(model),
    )
    report["repeated"] = publish(2, changed(model))
    report["engine_repeated"], report["transformers_repeated"] = engine_says(llm), transformers_says(model)
    whole = VllmAdapter.load

    def without_embedding(self: Any, pieces: Iterable[list[tuple[str, Any]]]) -> None:
        whole(self, ([(n, t) for n, t in piece if "embed_tokens" not in n] for piece in pieces))

    replace_method("load", without_embedding)
    # Without this, no loader is called any more.
    llm.collective_rpc(forget_recording)
    report["skipped"] = publish(3, changed(model))
    writer.close()
    return report


if __name__ == "__main__":
    import_once("vllm")
    sys.stdout.write("\nREPORT " + json.dumps(main(*sys.argv[1:])) + "\n")
