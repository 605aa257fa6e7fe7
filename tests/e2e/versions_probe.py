# SPDX-License-Identifier: Apache-2.0
"""A real engine, loaded while it answers. Run as a script: MODEL_DIR ENGINE PUBLICATIONS; prints one JSON
object.

The published weights make the model say one token for ever, another for each version, so an answer shows
which version wrote which token, and the recorded spans can be compared with it. A load that is half done says
nonsense.

After that come random weights, in the middle of an answer: all tokens after the load must be likeliest to
transformers with the same weights.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import sys
import time
from collections.abc import Callable
from itertools import groupby
from statistics import median
from typing import Any, get_args

import torch
from transformers import AutoModelForCausalLM

from recipe.async_pipeline.config.knobs.weight_sync import InFlightPolicy
from recipe.async_pipeline.lab.gpu_kit.engine_check import saying
from recipe.async_pipeline.weight_sync.engine.serving_rank import await_staged
from recipe.async_pipeline.weight_sync.engine.versioned_engine import recorded_spans
from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import WeightTicket, encode
from tests import HANG_S
from tests.e2e.probed_engines import ENGINES, import_once

WAYS = [*((in_flight, "host") for in_flight in get_args(InFlightPolicy)), ("keep", "device")]
ASKERS = 6
MAX_LEN = 64
SPARE = 2
"""SGLang keeps two positions of the context free."""
PROMPT = [20, 21, 11, 22, 23, 29]
SWAPS = 8
"""Loads of random weights for each way to load, after `MANY` publications."""
MANY = 200
ANSWERS_BETWEEN = 2
"""Most answers that end between two publications, while requests of other askers are in flight.

Not seconds: how many tokens these are would depend on the machine.
"""
LONG = MAX_LEN - len(PROMPT) - SPARE


class Probe:
    def __init__(self, model_dir: str, make_engine: Callable[[str, int], Any]) -> None:
        self.engine = make_engine(model_dir, MAX_LEN)
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.vocabulary = self.weights["lm_head.weight"].shape[0]
        self.writer = ArenaWriter(1 << 20, 16, torch.float32)
        self.version = -1
        self.load_s: list[float] = []
        self.answered = asyncio.Event()

    def gather(self, weights: dict[str, torch.Tensor]) -> WeightTicket:
        """Write a version into the arena."""
        return self.writer.gather(self.version, weights.items())

    def randomize(self) -> dict[str, torch.Tensor]:
        """Give the model other weights, and return what is published of them."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.weights[name] + torch.randn_like(parameter) * 0.05)
        found: dict[str, torch.Tensor] = self.model.state_dict()
        return found

    async def publish(self, weights: dict[str, torch.Tensor], in_flight: str, stage: str = "host") -> None:
        self.version += 1
        ticket = self.gather(weights)
        manifest = encode(await asyncio.to_thread(await_manifest, ticket, HANG_S))
        if stage == "device":
            boards = await self.engine.stage(manifest)
            await asyncio.wait_for(await_staged(boards, self.version), HANG_S)
        started = time.perf_counter()
        await self.engine.versioned.load(self.version, lambda: self.engine.load(manifest), in_flight)
        self.load_s.append(time.perf_counter() - started)

    async def publish_next(self, in_flight: str, stage: str = "host") -> None:
        await self.publish(saying(self.weights, (self.version + 1) % self.vocabulary), in_flight, stage)

    async def answer(self, tokens: int) -> tuple[list[int], list[Any]]:
        with recorded_spans() as spans:
            said, log_probs = await self.engine.answer(PROMPT, tokens)
        assert len(log_probs) == len(said)
        return said, list(spans)

    async def ask(self, stop: asyncio.Event, seed: int, wrong: list[Any], counts: dict[str, int]) -> None:
        chance = random.Random(seed)
        while not stop.is_set():
            wanted = chance.randint(1, LONG)
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
            self.answered.set()
            counts["boundaries"] += len(spans) - 1

    async def swap(self, in_flight: str, stage: str, delay_s: float) -> dict[str, Any]:
        """Load random weights in the middle of an answer.

        Returns how many versions wrote it, and `below_likeliest` of each part that transformers can repeat:
        the tokens before the load, the ones after it, a new answer.
        """
        before = copy.deepcopy(self.model)
        asked = asyncio.create_task(self.answer(LONG))
        await asyncio.sleep(delay_s)
        await self.publish(self.randomize(), in_flight, stage)
        (tokens, spans), (new, new_spans) = await asked, await self.answer(LONG)
        assert [span.version for span in new_spans] == [self.version] and len(tokens) == len(new) == LONG

        parts = {"new": below_likeliest(self.model, new, 0, LONG)}
        boundary = next((span.start for span in spans if span.version == self.version), LONG)
        # With `keep`, tokens after the load read old keys and values, which no model repeats.
        if boundary < LONG and in_flight != "keep":
            parts["after"] = below_likeliest(self.model, tokens, boundary, LONG)
        if boundary:
            parts["before"] = below_likeliest(before, tokens, 0, boundary)
        return {"versions": len(spans), "parts": parts}


def below_likeliest(model: Any, tokens: list[int], begin: int, end: int) -> float:
    """Return how far the logit of a token is below the largest, for the worst of these tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0].double()
    found = logits[len(PROMPT) + begin - 1 : len(PROMPT) + end - 1]
    chosen = found.gather(1, torch.tensor(tokens[begin:end])[:, None])[:, 0]
    return float((found.max(1).values - chosen).max())


async def run(model_dir: str, engine: str, publications: int) -> dict[str, Any]:
    probe = Probe(model_dir, ENGINES[engine])
    report: dict[str, Any] = {}
    torch.manual_seed(5)
    chance = random.Random(0)
    await probe.publish_next("keep")
    for in_flight, stage in WAYS:
        wrong: list[Any] = []
        stop, counts = asyncio.Event(), {"answers": 0, "boundaries": 0}
        askers = [asyncio.create_task(probe.ask(stop, seed, wrong, counts)) for seed in range(ASKERS)]
        probe.load_s.clear()
        for _ in range(publications):
            target = counts["answers"] + chance.randint(0, ANSWERS_BETWEEN)
            while counts["answers"] < target:
                probe.answered.clear()
                await asyncio.wait_for(probe.answered.wait(), HANG_S)
            await probe.publish_next(in_flight, stage)
        stop.set()
        await asyncio.gather(*askers)
        report[f"{in_flight}/{stage}"] = {**counts, "wrong": wrong[:3], "load_s": median(probe.load_s)}
        if publications < MANY:
            continue
        await probe.publish(probe.model.state_dict(), in_flight, stage)
        swaps = [await probe.swap(in_flight, stage, chance.uniform(0, 0.05)) for _ in range(SWAPS)]
        report[f"{in_flight}/{stage}"]["swaps"] = swaps
        # The next requests begin before the next publication, and random weights would answer them.
        await probe.publish_next(in_flight, stage)
    await probe.publish(probe.randomize(), "keep")
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
    import_once(sys.argv[2])
    sys.stdout.write(
        "\nREPORT " + json.dumps(asyncio.run(run(sys.argv[1], sys.argv[2], int(sys.argv[3])))) + "\n"
    )
