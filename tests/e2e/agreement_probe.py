# SPDX-License-Identifier: Apache-2.0
"""One engine writes responses with the versions of a run, and scores the responses of another engine under
the same versions; transformers in float64 says how far off each of them is. Run as a script: MODEL_DIR ENGINE
OTHER CHECKPOINTS, where OTHER is the file that the other has written, or -; prints one JSON object.

The prompts are the task's, and responses end where the model ends them. It was trained on nothing that
follows, and there float32 itself is off by more than engines may differ.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import encode
from tests import HANG_S
from tests.e2e.probed_engines import ENGINES, import_once
from tests.e2e.weights import saved_weights

VERSIONS, RESPONSES, TOKENS, MAX_LEN = 5, 32, 8, 64


def prompts_of(task: Path, version: int) -> list[list[int]]:
    """Return token ids of some of the task's prompts, others for each version."""
    rows = pq.read_table(task / "train.parquet", columns=["prompt"]).to_pylist()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    chosen = rows[version * RESPONSES : (version + 1) * RESPONSES]
    assert len(chosen) == RESPONSES
    return [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        for row in chosen
    ]


def until_end(said: tuple[list[int], list[float]], end: int) -> tuple[list[int], list[float]]:
    """Return tokens and log-probs up to the first end of a response."""
    tokens, log_probs = said
    length = tokens.index(end) + 1 if end in tokens else len(tokens)
    return tokens[:length], log_probs[:length]


def log_probs_of(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Return what transformers makes of tokens that follow a prompt, in the precision of the model."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].double()


def margins_of(exact: Any, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Return how far the likeliest token is ahead of the second at the place of each of these tokens."""
    with torch.no_grad():
        logits = exact(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    best: torch.Tensor = logits.topk(2).values
    margins: list[float] = (best[:, 0] - best[:, 1]).tolist()
    return margins


def farthest(found: Sequence[float] | torch.Tensor, reference: torch.Tensor) -> float:
    return float((torch.as_tensor(found, dtype=torch.float64) - reference).abs().max())


async def run(model_dir: str, engine: str, theirs: Any, checkpoints: Path) -> dict[str, Any]:
    served = ENGINES[engine](model_dir, MAX_LEN)
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    exact = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    writer = ArenaWriter(1 << 20, 16, torch.float32)
    written: list[dict[str, Any]] = []
    differences: list[float] = []
    errors: dict[str, list[float]] = {"writing": [], "scoring": [], "transformers": []}
    for version in range(1, VERSIONS + 1):
        weights = saved_weights(checkpoints, version)
        plain.load_state_dict(weights)
        exact.load_state_dict(weights)
        ticket = writer.gather(version, weights.items())
        manifest = encode(await asyncio.to_thread(await_manifest, ticket, HANG_S))
        await served.versioned.load(version, lambda manifest=manifest: served.load(manifest), "keep")  # type: ignore[misc]
        prompts, end = prompts_of(Path(model_dir).parent, version), plain.config.eos_token_id
        answers = await asyncio.gather(*(served.answer(prompt, TOKENS, 1.0) for prompt in prompts))
        sampled = [until_end(said, end) for said in answers]
        answers = await asyncio.gather(*(served.answer(prompt, TOKENS) for prompt in prompts))
        greedy = [until_end(said, end)[0] for said in answers]
        margins = [margins_of(exact, prompt, tokens) for prompt, tokens in zip(prompts, greedy, strict=True)]
        written.append({"prompts": prompts, "sampled": sampled, "greedy": greedy, "margins": margins})
        for prompt, (tokens, log_probs) in zip(prompts, sampled, strict=True):
            reference = log_probs_of(exact, prompt, tokens)
            errors["writing"].append(farthest(log_probs, reference))
            errors["transformers"].append(farthest(log_probs_of(plain, prompt, tokens), reference))
        if theirs is not None:
            other = theirs["written"][version - 1]
            for prompt, (tokens, log_probs) in zip(other["prompts"], other["sampled"], strict=True):
                scores = torch.tensor(await served.score(prompt, tokens), dtype=torch.float64)
                differences.append(farthest(log_probs, scores))
                errors["scoring"].append(farthest(scores, log_probs_of(exact, prompt, tokens)))
    writer.close()
    served.shutdown()
    return {"written": written, "differences": differences, "errors": errors}


if __name__ == "__main__":
    import_once(sys.argv[2])
    other = None if sys.argv[3] == "-" else json.loads(Path(sys.argv[3]).read_text(encoding="utf-8"))
    found = asyncio.run(run(sys.argv[1], sys.argv[2], other, Path(sys.argv[4])))
    sys.stdout.write("\nREPORT " + json.dumps(found) + "\n")
