# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines on the CPU, one per cell: MODELS TENSOR_PARALLEL. Prints one JSON object per cell.

Each cell publishes three versions: one through the engine's loader, one by repeated copies, and one that is
staged during generation. After each, the engine's greedy tokens and log-probs are compared with
transformers. Then a rank's loader is sabotaged. Each cell is a fork of a process that has imported vLLM.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

from recipe.async_pipeline.verl_bridge.rollout.vllm.adapter import VllmAdapter
from recipe.async_pipeline.verl_bridge.rollout.vllm.plugin import load_snapshot
from recipe.async_pipeline.verl_bridge.rollout.vllm.worker import PipelineWorkerExtension
from recipe.async_pipeline.weight_sync.engine.serving_rank import await_staged
from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import encode
from tests import HANG_S
from tests.fakes.checkpoints import SIZES, make, train

EXTENSION = "tests.verl_bridge.rollout.vllm.engine_matrix.SabotagedWorker"
SWAP = "ASYNC_PIPELINE_TEST_SWAP"
"""Names a file. While it exists, the last rank's loader swaps the two tensors that it names."""
LINEAR = ("qwen3-next", "qwen3.5")
"""Models for which vLLM's CPU kernels require bfloat16, and their state in float32."""
PROMPT = [20, 21, 11, 22, 23, 29]
TOKENS = 12


class SabotagedAdapter(VllmAdapter):
    """The adapter of an engine whose loader can be made wrong."""

    def load(self, pieces: Iterable[Sequence[tuple[str, torch.Tensor]]]) -> None:
        swap, last = Path(os.environ[SWAP]), get_tensor_model_parallel_world_size() - 1
        if swap.exists() and get_tensor_model_parallel_rank() == last:
            a, b = json.loads(swap.read_text())
            names = {a: b, b: a}
            super().load([(names.get(n, n), tensor) for n, tensor in piece] for piece in pieces)
        else:
            super().load(pieces)


class SabotagedWorker(PipelineWorkerExtension):
    """Named by its class: the ranks of an engine are spawned and import it."""

    adapter_class = SabotagedAdapter


class Cell:
    """One engine, and the model that it serves."""

    def __init__(self, name: str, size: int, folder: Path) -> None:
        self._swap = folder / "swap.json"
        os.environ[SWAP] = str(self._swap)
        dtype = torch.bfloat16 if name in LINEAR else torch.float32
        self.model = make(name, folder / "model").to(dtype)
        self.llm = LLM(
            str(folder / "model"),
            dtype=dtype,
            mamba_ssm_cache_dtype="float32",
            load_format="dummy",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=4,
            worker_extension_cls=EXTENSION,
            skip_tokenizer_init=True,
            tensor_parallel_size=size,
            distributed_executor_backend="mp" if size > 1 else "uni",
            seed=0,
        )
        self.writer = ArenaWriter(1 << 20, 1000, dtype)
        self.core: Any = self.llm.llm_engine.engine_core.engine_core

    def publish(self, version: int, *, stage: bool = False, reverse: bool = False) -> dict[str, Any]:
        weights = list(train(self.model, version).items())
        ticket = self.writer.gather(version, reversed(weights) if reverse else weights)
        manifest = encode(await_manifest(ticket, HANG_S))
        staged = None
        if stage:
            boards = self.core.collective_rpc("stage_snapshot", 60.0, (manifest,))
            staged = all(boards)
            if staged:
                asyncio.run(asyncio.wait_for(await_staged(boards, version), HANG_S))
        reports, _ = load_snapshot(self.core, manifest, 1 << 16, 60.0, None)
        proved = [report["tensors_proved"] for report in reports]
        return {"published": len(weights), "proved": proved, "staged": staged}

    def engine_says(self) -> tuple[list[int], list[float]]:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
        (answer,) = self.llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
        part = answer.outputs[0]
        tokens = list(part.token_ids)
        return tokens, [of[token].logprob for of, token in zip(part.logprobs, tokens, strict=True)]

    def transformers_says(self, tokens: list[int]) -> tuple[list[int], list[float]]:
        """Return the likeliest token at each place of an answer, and the log-probs of these `tokens`."""
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([PROMPT + tokens])).logits
        log_probs = logits[0, len(PROMPT) - 1 : -1].float().log_softmax(-1)
        return log_probs.argmax(-1).tolist(), log_probs[range(TOKENS), tokens].tolist()

    def run(self) -> dict[str, Any]:
        versions = []
        for version in range(1, 4):
            report = self.publish(version, stage=version == 3)
            tokens, scores = self.engine_says()
            wanted, wanted_scores = self.transformers_says(tokens)
            furthest = max(abs(a - b) for a, b in zip(scores, wanted_scores, strict=True))
            versions.append(report | {"tokens": tokens, "wanted": wanted, "furthest": furthest})
        norms = [one for one in self.model.named_parameters() if one[0].endswith("norm.weight")]
        names = [name for name, weight in norms if weight.numel() == SIZES["hidden_size"]]
        self._swap.write_text(json.dumps(names[:2]))
        try:
            self.publish(4, reverse=True)  # another layout, so that the loader runs again
        except Exception as error:  # noqa: BLE001  of whichever class the executor raises
            caught = f"{type(error).__name__}: {error}"
        else:
            caught = ""
        self.writer.close()
        return {"versions": versions, "swapped": names[:2], "caught": caught}


def run_cell(name: str, size: int) -> None:
    """Run one cell in a fork, which has all imports, and print its result."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    started = time.perf_counter()
    status = 1
    try:
        with tempfile.TemporaryDirectory() as folder:
            report = Cell(name, size, Path(folder)).run()
        report["seconds"] = round(time.perf_counter() - started, 1)
        sys.stdout.write(f"\nREPORT {json.dumps({'cell': [name, size], **report})}\n")
        sys.stdout.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(status)


if __name__ == "__main__":
    for cell in sys.argv[1:]:
        model, _, ranks = cell.rpartition("@")
        run_cell(model, int(ranks))
