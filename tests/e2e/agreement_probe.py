# SPDX-License-Identifier: Apache-2.0
"""One engine writes responses with five versions, and scores the responses of another engine under the same
versions. Run as a script: MODEL_DIR ENGINE OTHER, where OTHER is the file that the other has written, or -;
prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from recipe.async_pipeline.weight_sync.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.board import await_manifest
from recipe.async_pipeline.weight_sync.manifest import encode
from tests.e2e.probed_engines import ENGINES

VERSIONS, RESPONSES, TOKENS, MAX_LEN = 5, 16, 24, 64
CHANGE = 0.02
"""Standard deviation of what a version adds to each weight: far more than an optimizer step."""


def versions_of(model_dir: str) -> list[dict[str, torch.Tensor]]:
    """Return the weights of all versions, the same in each process."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    random = torch.Generator().manual_seed(7)
    made = []
    for _ in range(VERSIONS):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=random) * CHANGE)
        made.append({name: value.clone() for name, value in model.state_dict().items()})
    return made


async def run(model_dir: str, engine: str, theirs: Any) -> dict[str, Any]:
    served = ENGINES[engine](model_dir, MAX_LEN)
    writer = ArenaWriter(1 << 20, 16, torch.float32)
    written, differences = [], []
    for version, weights in enumerate(versions_of(model_dir)):
        ticket = writer.gather(version, weights.items())
        manifest = encode(await asyncio.to_thread(await_manifest, ticket, 60.0))
        await served.versioned.load(version, lambda manifest=manifest: served.load(manifest), "keep")  # type: ignore[misc]
        prompts = [[11 + number % 9, 20, 11 + version, 21] for number in range(RESPONSES)]
        sampled = await asyncio.gather(*(served.answer(prompt, TOKENS, 1.0) for prompt in prompts))
        greedy = await asyncio.gather(*(served.answer(prompt, TOKENS) for prompt in prompts))
        written.append({"prompts": prompts, "sampled": sampled, "greedy": [tokens for tokens, _ in greedy]})
        if theirs is not None:
            other = theirs["written"][version]
            for prompt, (tokens, log_probs) in zip(other["prompts"], other["sampled"], strict=True):
                scores = await served.score(prompt, tokens)
                differences.append(max(abs(a - b) for a, b in zip(scores, log_probs, strict=True)))
    writer.close()
    served.shutdown()
    return {"written": written, "differences": differences}


if __name__ == "__main__":
    other = None if sys.argv[3] == "-" else json.loads(Path(sys.argv[3]).read_text(encoding="utf-8"))
    found = asyncio.run(run(sys.argv[1], sys.argv[2], other))
    sys.stdout.write("\nREPORT " + json.dumps(found) + "\n")
