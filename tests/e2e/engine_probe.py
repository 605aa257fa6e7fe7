# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine, loaded through the arena. Run as a script: MODEL_DIR MODE; prints one JSON object.

MODE `load`: publish other weights and compare what the engine then says with transformers; then let the
loader skip the embedding. MODE `repacked`: leave vLLM's CPU repack on.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from recipe.async_pipeline.errors import AsyncPipelineError
from recipe.async_pipeline.verl_bridge.vllm_worker import PipelineWorkerExtension
from recipe.async_pipeline.weight_sync.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.manifest import encode

NAME = "recipe.async_pipeline.verl_bridge.vllm_worker.PipelineWorkerExtension"
PROMPT = [20, 21, 11, 22, 23, 29]


def changed(model: Any) -> dict[str, torch.Tensor]:
    """Other weights than those on disk, by published name; with tied embeddings without a head."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    tied = model.config.tie_word_embeddings
    return {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}


def engine_says(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return list(llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0].outputs[0].token_ids)


def transformers_says(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    for _ in range(12):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(PROMPT) :].tolist()


def load(llm: LLM, manifest: bytes) -> dict[str, Any]:
    try:
        report, _ = llm.collective_rpc("load_snapshot", args=(manifest, 1 << 16))[0]
        return {"ok": report}
    except AsyncPipelineError as error:
        return {"error": type(error).__name__, "message": str(error)}


def main(model_dir: str, mode: str) -> dict[str, Any]:
    if mode == "repacked":
        PipelineWorkerExtension.__new__ = lambda cls, **kwargs: object.__new__(cls)
    llm = LLM(
        model_dir, dtype="float32", enforce_eager=True, max_model_len=64, worker_extension_cls=NAME, seed=0
    )
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    writer = ArenaWriter(1 << 20, 16, torch.float32)
    before = engine_says(llm)
    weights = changed(model)
    report: dict[str, Any] = {"first": load(llm, encode(writer.gather(1, weights.items())))}
    report["before"], report["engine"], report["transformers"] = before, engine_says(llm), transformers_says(model)
    whole = PipelineWorkerExtension._load_piece
    PipelineWorkerExtension._load_piece = lambda self, served, piece: whole(
        self, served, [(n, t) for n, t in piece if "embed_tokens" not in n]
    )
    report["skipped"] = load(llm, encode(writer.gather(2, changed(model).items())))
    writer.close()
    return report


if __name__ == "__main__":
    sys.stdout.write("\nREPORT " + json.dumps(main(*sys.argv[1:])) + "\n")
