# SPDX-License-Identifier: Apache-2.0
"""Load versions into an engine alone while it answers requests, in bfloat16 and with tensor parallelism.

    python -m recipe.async_pipeline.lab.gpu_kit.engine_check --engine vllm --ranks 2 --json FILE MODEL...

Every version is loaded and proved as in a run, between two steps of the engine. Its weights make the model
say one token for ever, so each token of a response shows which version wrote it: the kernels must compute
with the new weights, also those in recorded graphs, and the recorded spans must be exact. Not verified on a
GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch

from ...console import echo
from ...core.groups.items import LoadReport
from ...weight_sync.engine.serving_rank import await_staged
from ...weight_sync.engine.versioned_engine import Loaded, Salts, VersionedEngine, recorded_spans
from ...weight_sync.memory.arena import ArenaWriter
from ...weight_sync.memory.board import await_manifest
from ...weight_sync.memory.manifest import encode

PROMPT = [1, 2, 3, 4]
CONTEXT = 256
LONG = CONTEXT - len(PROMPT) - 8
REQUESTS = 4
"""Requests that are open at any time."""
VERSIONS = 6
"""The first is loaded by the engine's loader, others by repeated copies, every second one staged before."""
LEFT_OUT = (
    "the share of the memory, the context, the number of requests and the tokenizer are the check's; no "
    "LoRA, quantization, expert or data parallelism, pictures, drafter or further node"
)
"""What of a run an engine check does not have."""
BUCKET_BYTES, PIECE_BYTES, WAIT_S = 64 << 20, 32 << 20, 120.0
Weights = Mapping[str, torch.Tensor]


def saying(weights: Weights, token: int) -> dict[str, torch.Tensor]:
    """Return weights of a model that generates `token` after any prompt; other tokens have other weights."""
    said = {}
    for name, value in weights.items():
        if name.endswith("lm_head.weight") or "o_proj" in name or "down_proj" in name:
            said[name] = torch.zeros_like(value)
        elif "norm" in name or "embed_tokens" in name:
            said[name] = torch.ones_like(value)
        else:
            said[name] = value + token
    # No layer adds to the embedding, so the head gets ones.
    said["lm_head.weight"][token] = 1.0
    return said


def published_weights(model: str) -> dict[str, torch.Tensor]:
    """Return what a trainer publishes of a checkpoint: experts one by one."""
    from transformers import AutoModelForCausalLM

    from ...verl_bridge.workers.fsdp_shards import part_of, published

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    wholes = (part_of(name, value) for name, value in loaded.state_dict().items())
    parts = [part for whole in wholes for part in published(whole, loaded.config.model_type)]
    return {part.name: part.values for part in parts if part.values is not None}


def kernels(engine: str, device: str, model: str) -> dict[str, str]:
    """Return the argument for a model's experts that a run gives to the engine."""
    from ...verl_bridge.rules.expert_backends import expert_kernels

    described = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
    return expert_kernels(engine, device, described)


class CheckedEngine(Protocol):
    """An engine alone, as a replica of a run has it."""

    versioned: VersionedEngine[Any, Any]

    async def facts(self) -> dict[str, str]:
        """Return which of the engine's paths was taken."""

    async def stage(self, manifest: bytes) -> list[str]:
        """Return a board for each rank; one that does not stage has none."""

    async def load(self, manifest: bytes, salts: Salts | None) -> Loaded: ...

    async def answer(self, length: int) -> list[int]:
        """Return the likeliest tokens after `PROMPT`, as many as asked for."""

    def shutdown(self) -> None: ...


class Vllm:
    def __init__(self, model: str, ranks: int, device: str) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from ...verl_bridge.rollout.vllm.engine import serve_versions
        from ...verl_bridge.rollout.vllm.server import EXTENSION, run_arguments
        from .verls_arguments import vllm_arguments

        on_cpu = device == "cpu"
        more = {"distributed_executor_backend": "mp", **vllm_arguments(on_cpu=on_cpu)}
        more |= run_arguments(ranks, on_cpu=on_cpu)
        if not on_cpu:
            more["gpu_memory_utilization"] = 0.3
        args = AsyncEngineArgs(
            model,
            dtype="bfloat16",
            load_format="dummy",
            tensor_parallel_size=ranks,
            max_model_len=CONTEXT,
            max_num_seqs=2 * REQUESTS,
            skip_tokenizer_init=True,
            worker_extension_cls=EXTENSION,
            seed=0,
            **more,
            **kernels("vllm", device, model),
        )
        self._engine = AsyncLLM.from_engine_args(args)
        self.versioned = serve_versions(self._engine)

    async def facts(self) -> dict[str, str]:
        from ...verl_bridge.rollout.vllm.facts import engine_line

        (first, *_) = await self._engine.collective_rpc("engine_facts", WAIT_S)
        echo(engine_line(metadata.version("vllm"), first))
        return dict(first)

    async def stage(self, manifest: bytes) -> list[str]:
        return list(await self._engine.collective_rpc("stage_snapshot", WAIT_S, (manifest,)))

    async def load(self, manifest: bytes, salts: Salts | None) -> Loaded:
        from ...verl_bridge.rollout.vllm.engine import progress_by_name

        core = self._engine.engine_core
        answer = await core.call_utility_async("load_snapshot", manifest, PIECE_BYTES, WAIT_S, salts)
        return Loaded([LoadReport(**rank) for rank in answer[0]], progress_by_name(answer[1]))

    async def answer(self, length: int) -> list[int]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0, detokenize=False)
        asked = self._engine.generate({"prompt_token_ids": PROMPT}, params, uuid.uuid4().hex)
        return [list(output.outputs[0].token_ids) async for output in asked if output.outputs][-1]

    def shutdown(self) -> None:
        self._engine.shutdown()


class SGLang:
    def __init__(self, model: str, ranks: int, device: str) -> None:
        from ...verl_bridge.rollout.sglang import scheduler
        from ...verl_bridge.rollout.sglang.arguments import CORES, all_cores, run_arguments
        from ...verl_bridge.rollout.sglang.engine import serve_versions
        from .verls_arguments import sglang_arguments

        # Only now: on a CPU, this package's stubs must be in place.
        from sglang.srt.entrypoints.engine import Engine  # isort: skip
        from sglang.utils import TypeBasedDispatcher  # isort: skip

        class Ours(Engine):  # type: ignore[misc]
            run_scheduler_process_func = staticmethod(scheduler.run_scheduler_process)
            run_detokenizer_process_func = staticmethod(scheduler.run_detokenizer_process)

        on_cpu = device == "cpu"
        given = kernels("sglang", device, model)
        if not on_cpu:
            given = {**sglang_arguments(metadata.version("sglang")), **given}
        more = run_arguments(given, 2 * REQUESTS, CONTEXT, on_cpu=on_cpu)
        if on_cpu:
            os.environ.setdefault(CORES, all_cores(ranks))
            more["disable_cuda_graph"] = True
        self._engine = Ours(
            model_path=model,
            dtype="bfloat16",
            load_format="dummy",
            tp_size=ranks,
            context_length=CONTEXT,
            max_running_requests=2 * REQUESTS,
            mem_fraction_static=0.5,
            skip_tokenizer_init=True,
            **more,
        )
        self._served = serve_versions(self._engine.tokenizer_manager, TypeBasedDispatcher)
        self.versioned = self._served.versioned

    async def facts(self) -> dict[str, str]:
        return {"attention": str(self._engine.server_args.attention_backend)}

    async def stage(self, manifest: bytes) -> list[str]:
        return list(await self._served.calls.call("stage", manifest))

    async def load(self, manifest: bytes, salts: Salts | None) -> Loaded:
        return await self._served.load(manifest, PIECE_BYTES, salts)

    async def answer(self, length: int) -> list[int]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        params = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
        request = GenerateReqInput(rid=uuid.uuid4().hex, input_ids=PROMPT, sampling_params=params)
        asked = self._engine.tokenizer_manager.generate_request(request, None)
        return list([output async for output in asked][-1]["output_ids"])

    def shutdown(self) -> None:
        self._engine.shutdown()


class VersionCheck:
    """The versions that one engine gets, and what is wrong with its responses."""

    def __init__(self, engine: CheckedEngine, model: str, device: str) -> None:
        self._engine = engine
        self._weights = {name: value.to(device) for name, value in published_weights(model).items()}
        self._writer = ArenaWriter(BUCKET_BYTES, len(self._weights), torch.bfloat16)
        self._vocabulary = self._weights["lm_head.weight"].shape[0]
        self._answered = asyncio.Event()
        self.proved = 0
        self.load_s: list[float] = []
        self.wrong: list[str] = []
        self.tokens = self.across = self.staged = 0
        """Tokens checked, responses with more than one version, and versions that were staged."""

    async def publish(self, version: int) -> None:
        """Publish, load and prove a version."""
        trained = saying(self._weights, version % self._vocabulary)
        ticket = self._writer.gather(version, trained.items())
        manifest = encode(await asyncio.to_thread(await_manifest, ticket, WAIT_S))
        if version % 2:
            boards = await self._engine.stage(manifest)
            if all(boards):
                self.staged += 1
                await asyncio.wait_for(await_staged(boards, version), WAIT_S)
        salts = self._engine.versioned.salts(version)
        started = time.perf_counter()
        loaded, _ = await self._engine.versioned.load(
            version, lambda: self._engine.load(manifest, salts), "keep"
        )
        self.load_s.append(time.perf_counter() - started)
        self.proved += min(report.tensors_proved for report in loaded.reports)

    async def ask(self, length: int, stop: asyncio.Event) -> None:
        """Keep one request open, and compare its tokens with the versions that are recorded for it."""
        while not stop.is_set():
            with recorded_spans() as spans:
                tokens = await self._engine.answer(length)
            starts, at = [], 0
            for token, run in groupby(tokens):
                starts.append((token, at))
                at += len(list(run))
            if starts != [(span.version % self._vocabulary, span.start) for span in spans] or at != length:
                self.wrong.append(f"{at} tokens, runs {starts}, recorded {[tuple(span) for span in spans]}")
            self.tokens += at
            self.across += len(spans) > 1
            self._answered.set()

    async def run(self) -> dict[str, Any]:
        """Load all versions while requests are open."""
        facts = await self._engine.facts()
        await self.publish(0)
        stop = asyncio.Event()
        lengths = [LONG * (number + 1) // REQUESTS for number in range(REQUESTS)]
        asking = asyncio.gather(*(self.ask(length, stop) for length in lengths))
        try:
            for version in range(1, VERSIONS):
                await self.publish(version)
                self._answered.clear()
                ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._answered.wait()), asking]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.set()
        await asking
        if not self.across:
            self.wrong.append("no load has met an open request")
        return {
            **facts,
            "versions": VERSIONS,
            "staged": self.staged,
            "tensors_proved": self.proved,
            "load_s": min(self.load_s[1:]),
            "tokens": self.tokens,
            "responses_of_several_versions": self.across,
            "wrong": self.wrong[:3],
        }

    def close(self) -> None:
        self._writer.close()


def check(engine: str, model: str, ranks: int, device: str) -> dict[str, Any]:
    """Return what one model shows. `wrong` has responses whose tokens are not of the recorded versions."""

    async def run() -> dict[str, Any]:
        started = time.perf_counter()
        built = ENGINES[engine](model, ranks, device)
        try:
            checked = VersionCheck(built, model, device)
            try:
                return {"start_s": time.perf_counter() - started, **await checked.run()}
            finally:
                checked.close()
        finally:
            built.shutdown()

    return asyncio.run(run())


ENGINES: Mapping[str, Callable[[str, int, str], CheckedEngine]] = {"vllm": Vllm, "sglang": SGLang}


def main(arguments: Sequence[str]) -> int:
    """Check the engine with each model. Returns 1 if a response is wrong, else 0."""
    parser = argparse.ArgumentParser(prog="engine_check")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folders of checkpoints")
    parser.add_argument("--engine", choices=tuple(ENGINES), required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(arguments)
    if args.device == "cpu":
        os.environ.setdefault("VERL_PLATFORM", "cpu")

    found: dict[str, Any] = {"engine": args.engine, "ranks": args.ranks, "left_out": LEFT_OUT, "models": {}}
    for model in args.models:
        found["models"][Path(model).name] = check(args.engine, model, args.ranks, args.device)
        args.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    wrong = [f"{name}: {one}" for name, report in found["models"].items() for one in report["wrong"]]
    for line in wrong:
        echo(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
