# SPDX-License-Identifier: Apache-2.0
"""Answers of a real engine that must have a form, also across loads. Run as a script: MODEL_DIR ENGINE;
prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.async_pipeline.gateway.turns import ANY_TOOL, Form
from recipe.async_pipeline.verl_bridge.agent_loop.sessions.response_form import structured
from recipe.async_pipeline.weight_sync.engine.versioned_engine import recorded_spans
from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import encode
from tests import HANG_S
from tests.e2e.probed_engines import ENGINES, import_once

MAX_LEN = 250
TOKENS = 200
PROMPT = [20, 21, 11, 22, 23, 29]
ANSWERS = 8
SCHEMA = {
    "type": "object",
    "properties": {"move": {"enum": ["L", "R"]}, "sure": {"type": "boolean"}},
    "required": ["move", "sure"],
    "additionalProperties": False,
}
LONG = {"type": "array", "items": {"enum": [0, 1]}, "minItems": 50, "maxItems": 50}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("step", "look")]
FORMS = {
    "schema": Form(schema=SCHEMA),
    "any tool": Form(call=ANY_TOOL, tools=TOOLS),
    "named tool": Form(call="look", tools=TOOLS),
    "schema or tools": Form(schema=SCHEMA, tools=TOOLS),
}


class Probe:
    def __init__(self, model_dir: str, engine: str) -> None:
        self.engine = ENGINES[engine](model_dir, MAX_LEN)
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.weights = model.state_dict()
        self.writer = ArenaWriter(1 << 20, 16, torch.float32)
        self.version = -1

    async def publish(self, in_flight: str) -> None:
        self.version += 1
        ticket = self.writer.gather(self.version, self.weights.items())
        manifest = encode(await asyncio.to_thread(await_manifest, ticket, HANG_S))
        await self.engine.versioned.load(self.version, lambda: self.engine.load(manifest), in_flight)

    async def answers(self, form: Form) -> dict[str, Any]:
        """Return the texts that are not cut off, and how far log-probs are above the ones of the model."""
        whole, above = [], []
        for _ in range(ANSWERS):
            tokens, log_probs = await self.engine.formed(PROMPT, TOKENS, structured(form, "hermes"))
            raw = await self.engine.score(PROMPT, tokens)
            above += [one - other for one, other in zip(log_probs, raw, strict=True)]
            if len(tokens) < TOKENS:
                whole.append(self.tokenizer.decode(tokens, skip_special_tokens=True))
        return {"whole": whole, "least": min(above), "mean": sum(above) / len(above), "most": max(above)}

    async def across_a_load(self, in_flight: str) -> dict[str, Any]:
        """Load a version in the middle of an answer."""
        await self.publish(in_flight)
        with recorded_spans() as spans:
            asking = asyncio.create_task(
                self.engine.formed(PROMPT, TOKENS, structured(Form(schema=LONG), None), in_flight)
            )
            while not await self.engine.versioned.written([in_flight]):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.005)
            await self.publish(in_flight)
            tokens, _ = await asking
        return {
            "text": self.tokenizer.decode(tokens, skip_special_tokens=True),
            "spans": list(spans),
            "last": self.version,
        }


async def run(model_dir: str, engine: str) -> dict[str, Any]:
    probe = Probe(model_dir, engine)
    await probe.publish("keep")
    report = {name: await probe.answers(form) for name, form in FORMS.items()}
    for in_flight in ("keep", "abort", "drain"):
        report[in_flight] = await probe.across_a_load(in_flight)
    probe.writer.close()
    probe.engine.shutdown()
    return report


if __name__ == "__main__":
    import_once(sys.argv[2])
    sys.stdout.write("\nREPORT " + json.dumps(asyncio.run(run(sys.argv[1], sys.argv[2]))) + "\n")
