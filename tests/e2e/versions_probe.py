# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine, loaded while it answers. Run as a script: MODEL_DIR PUBLICATIONS; prints one JSON
object.

The published weights make the model say one token for ever, another for each version, so an answer shows
which
version wrote which token, and the recorded spans can be compared with it. A load that is half done says
nonsense.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import uuid
from itertools import groupby
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from recipe.async_pipeline.config.schema import IN_FLIGHT_POLICIES
from recipe.async_pipeline.core.items import LoadReport
from recipe.async_pipeline.verl_bridge.rollout.vllm.plugin import IN_PROCESS
from recipe.async_pipeline.weight_sync.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.board import await_manifest
from recipe.async_pipeline.weight_sync.manifest import encode
from recipe.async_pipeline.weight_sync.versioned_engine import Loaded, VersionedEngine, recorded_spans

EXTENSION = "recipe.async_pipeline.verl_bridge.rollout.vllm.worker.PipelineWorkerExtension"
WAYS = [*((in_flight, "host") for in_flight in IN_FLIGHT_POLICIES), ("keep", "device")]
ASKERS = 6
MAX_LEN = 64
PROMPT = [20, 21, 11, 22, 23, 29]


def saying(weights: dict[str, torch.Tensor], token: int) -> dict[str, torch.Tensor]:
    """Return weights of a model that generates `token` for any prompt."""
    said = {}
    for name, value in weights.items():
        if "o_proj" in name or "down_proj" in name or name == "lm_head.weight":
            said[name] = torch.zeros_like(value)
        elif "norm" in name or "embed_tokens" in name:
            said[name] = torch.ones_like(value)
        else:
            said[name] = value + token
    # Nothing is added to the embedding, so the head sees ones.
    said["lm_head.weight"][token] = 1.0
    return said


class Probe:
    def __init__(self, model_dir: str) -> None:
        args = AsyncEngineArgs(
            model_dir,
            dtype="float32",
            enforce_eager=True,
            max_model_len=MAX_LEN,
            worker_extension_cls=EXTENSION,
            distributed_executor_backend=IN_PROCESS,
            seed=0,
        )
        self.engine = AsyncLLM.from_engine_args(args)
        self.versioned = VersionedEngine(self.engine)
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.vocabulary = self.weights["lm_head.weight"].shape[0]
        self.writer = ArenaWriter(1 << 20, 16, torch.float32)
        self.version = -1
        self.load_s: list[float] = []

    async def publish(self, weights: dict[str, torch.Tensor], in_flight: str, stage: str = "host") -> None:
        self.version += 1
        ticket = self.writer.gather(self.version, weights.items())
        manifest = encode(await asyncio.to_thread(await_manifest, ticket, 60.0))
        if stage == "device":
            assert await self.engine.collective_rpc("stage_snapshot", 60.0, (manifest,)) == [True]
            while await self.engine.collective_rpc("staged_version", 60.0) != [self.version]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

        async def load() -> Loaded:
            answer = self.engine.engine_core.call_utility_async("load_snapshot", manifest, 1 << 16, 60.0)
            reports, progress = await answer
            return Loaded([LoadReport(**report) for report in reports], progress)

        started = time.perf_counter()
        await self.versioned.load(self.version, load, in_flight)
        self.load_s.append(time.perf_counter() - started)

    async def publish_next(self, in_flight: str, stage: str = "host") -> None:
        await self.publish(saying(self.weights, (self.version + 1) % self.vocabulary), in_flight, stage)

    async def answer(self, tokens: int) -> tuple[list[int], list[Any]]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        asked = self.engine.generate({"prompt_token_ids": PROMPT}, params, request_id=uuid.uuid4().hex)
        with recorded_spans() as spans:
            part = [output.outputs[0] async for output in asked if output.outputs][-1]
        assert len(part.logprobs) == len(part.token_ids)
        return list(part.token_ids), list(spans)

    async def ask(self, stop: asyncio.Event, seed: int, wrong: list[Any], counts: dict[str, int]) -> None:
        chance = random.Random(seed)
        while not stop.is_set():
            wanted = chance.randint(1, MAX_LEN - len(PROMPT))
            tokens, spans = await self.answer(wanted)
            runs, start = [], 0
            for token, run in groupby(tokens):
                runs.append([token, start])
                start += len(list(run))
            seen = [[span.version % self.vocabulary, span.start] for span in spans]
            versions = [span.version for span in spans]
            if seen != runs or start != wanted or versions != sorted(set(versions)):
                wrong.append({"tokens": tokens, "spans": spans, "wanted": wanted})
            counts["answers"] += 1
            counts["over_versions"] += len(spans) > 1


async def run(model_dir: str, publications: int) -> dict[str, Any]:
    probe = Probe(model_dir)
    report: dict[str, Any] = {}
    chance = random.Random(0)
    await probe.publish_next("keep")
    for in_flight, stage in WAYS:
        wrong: list[Any] = []
        stop, counts = asyncio.Event(), {"answers": 0, "over_versions": 0}
        askers = [asyncio.create_task(probe.ask(stop, seed, wrong, counts)) for seed in range(ASKERS)]
        probe.load_s.clear()
        for _ in range(publications):
            await asyncio.sleep(chance.uniform(0, 0.05))
            await probe.publish_next(in_flight, stage)
        stop.set()
        await asyncio.gather(*askers)
        report[f"{in_flight}/{stage}"] = {**counts, "wrong": wrong[:3], "load_s": median(probe.load_s)}
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in probe.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    await probe.publish(probe.model.state_dict(), "keep")
    report["engine"] = (await probe.answer(12))[0]
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat([ids, probe.model(ids).logits[:, -1:].argmax(-1)], dim=1)
    report["transformers"] = ids[0, len(PROMPT) :].tolist()
    report["versions"] = probe.version
    probe.writer.close()
    probe.engine.shutdown()
    return report


if __name__ == "__main__":
    sys.stdout.write("\nREPORT " + json.dumps(asyncio.run(run(sys.argv[1], int(sys.argv[2])))) + "\n")
