# SPDX-License-Identifier: Apache-2.0
"""Real engines without verl and Ray, with the same few methods."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from multiprocessing import active_children
from typing import Any, Protocol

from recipe.async_pipeline.core.groups.items import LoadReport
from recipe.async_pipeline.verl_bridge import replaced
from recipe.async_pipeline.verl_bridge.cpu import prefork
from recipe.async_pipeline.weight_sync.engine.versioned_engine import FORM, Loaded, Salts, VersionedEngine
from tests import HANG_S

SPAWNING = {"vllm": "vLLM's server", "sglang": "SGLang's server on a CPU"}
EXTENSION = "recipe.async_pipeline.verl_bridge.rollout.vllm.worker.PipelineWorkerExtension"
PIECE_BYTES = 1 << 16


def import_once(engine: str) -> None:
    """Import an engine for this process and its core, which is forked from it. Call it before all else."""
    name = engine.partition("-")[0]
    for module in prefork.IMPORTS[name]:
        import_module(module)
    prefork.begin({prefork.EARLY: name})
    replaced.apply(SPAWNING[name])


class ProbedEngine(Protocol):
    """One engine that serves versions."""

    versioned: VersionedEngine[Any, Any]

    async def stage(self, manifest: bytes) -> list[str]: ...

    async def load(self, manifest: bytes, salts: Salts | None = None) -> Loaded: ...

    async def answer(
        self, prompt: list[int], tokens: int, temperature: float = 0.0
    ) -> tuple[list[int], list[float]]:
        """Return tokens, by default the likeliest, and their log-probs."""

    async def formed(
        self, prompt: list[int], tokens: int, form: dict[str, str], name: str = ""
    ) -> tuple[list[int], list[float]]:
        """Return a response of a form, as verl's servers get it, and its log-probs."""

    async def score(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """Return the log-probs of tokens that follow a prompt."""

    async def cached(self, prompt: list[int], tokens: int) -> int:
        """Write so many tokens, and return how many tokens of the prompt came from the cache."""

    def shutdown(self) -> None: ...


class Vllm:
    def __init__(
        self,
        model_dir: str,
        max_len: int,
        at_once: int = 64,
        block: int | None = None,
        *,
        async_scheduling: bool = False,
    ) -> None:
        """`at_once`: requests that it answers at the same time; `block`: tokens of a block of the cache."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from recipe.async_pipeline.verl_bridge.rollout.vllm.engine import rejections, serve_versions
        from recipe.async_pipeline.verl_bridge.rollout.vllm.server import run_arguments

        args = AsyncEngineArgs(
            model_dir,
            dtype="float32",
            enforce_eager=True,
            max_model_len=max_len,
            max_num_seqs=at_once,
            block_size=block,
            worker_extension_cls=EXTENSION,
            seed=0,
            **run_arguments(1, on_cpu=True),
        )
        config = args.create_engine_config()
        # vLLM switches it off on a CPU, but it works there.
        config.scheduler_config.async_scheduling = async_scheduling
        self._engine = AsyncLLM.from_vllm_config(config)
        self.versioned = serve_versions(self._engine, rejections())

    async def stage(self, manifest: bytes) -> list[str]:
        boards: list[str] = await self._engine.collective_rpc("stage_snapshot", HANG_S, (manifest,))
        return boards

    async def load(self, manifest: bytes, salts: Salts | None = None) -> Loaded:
        from recipe.async_pipeline.verl_bridge.rollout.vllm.engine import progress_by_name

        core = self._engine.engine_core
        answer = await core.call_utility_async("load_snapshot", manifest, PIECE_BYTES, HANG_S, salts)
        reports, progress = answer
        return Loaded([LoadReport(**report) for report in reports], progress_by_name(progress))

    async def answer(
        self, prompt: list[int], tokens: int, temperature: float = 0.0
    ) -> tuple[list[int], list[float]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, logprobs=0)
        return await self._said(prompt, params)

    async def formed(
        self, prompt: list[int], tokens: int, form: dict[str, str], name: str = ""
    ) -> tuple[list[int], list[float]]:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        params = SamplingParams(
            max_tokens=tokens, logprobs=0, structured_outputs=StructuredOutputsParams(**form)
        )
        return await self._said(prompt, params, name)

    async def _said(self, prompt: list[int], params: Any, name: str = "") -> tuple[list[int], list[float]]:
        name = name or uuid.uuid4().hex
        asked = self._engine.generate({"prompt_token_ids": prompt}, params, request_id=name)
        part = [output.outputs[0] async for output in asked if output.outputs][-1]
        chosen = [entry[token].logprob for token, entry in zip(part.token_ids, part.logprobs, strict=True)]
        return list(part.token_ids), chosen

    async def cached(self, prompt: list[int], tokens: int) -> int:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        asked = self._engine.generate({"prompt_token_ids": prompt}, params, request_id=uuid.uuid4().hex)
        return int([output async for output in asked][-1].num_cached_tokens)

    async def score(self, prompt: list[int], tokens: list[int]) -> list[float]:
        from vllm import SamplingParams

        whole = [*prompt, *tokens]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        asked = self._engine.generate({"prompt_token_ids": whole}, params, request_id=uuid.uuid4().hex)
        found = [output async for output in asked][-1].prompt_logprobs
        return [found[at][whole[at]].logprob for at in range(len(prompt), len(whole))]

    def shutdown(self) -> None:
        self._engine.shutdown()


class SGLang:
    _of_each_request: Mapping[str, Any] = {}

    def __init__(
        self, model_dir: str, max_len: int, at_once: int = 64, block: int | None = None, **arguments: Any
    ) -> None:
        """`at_once`: requests that it answers at the same time; its cache has no blocks."""
        from recipe.async_pipeline.verl_bridge.rollout.sglang import scheduler
        from recipe.async_pipeline.verl_bridge.rollout.sglang.arguments import run_arguments
        from recipe.async_pipeline.verl_bridge.rollout.sglang.engine import serve_versions

        # Only now: this package's stubs must be in place.
        from sglang.srt.entrypoints.engine import Engine  # isort: skip
        from sglang.utils import TypeBasedDispatcher  # isort: skip

        class Ours(Engine):  # type: ignore[misc]
            run_scheduler_process_func = staticmethod(scheduler.run_scheduler_process)
            run_detokenizer_process_func = staticmethod(scheduler.run_detokenizer_process)

        self._engine = Ours(
            model_path=model_dir,
            dtype="float32",
            skip_tokenizer_init=True,
            mem_fraction_static=0.3,
            disable_cuda_graph=True,
            context_length=max_len,
            **run_arguments({"max_running_requests": at_once, **arguments}, 64, max_len, on_cpu=True),
        )
        self._served = serve_versions(self._engine.tokenizer_manager, TypeBasedDispatcher)
        self.versioned = self._served.versioned

    async def stage(self, manifest: bytes) -> list[str]:
        boards: list[str] = await self._served.calls.call("stage", manifest)
        return boards

    async def load(self, manifest: bytes, salts: Salts | None = None) -> Loaded:
        return await self._served.load(manifest, PIECE_BYTES, salts)

    async def answer(
        self, prompt: list[int], tokens: int, temperature: float = 0.0
    ) -> tuple[list[int], list[float]]:
        params = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
        output = await self._ask(prompt, params)
        return list(output["output_ids"]), [one[0] for one in output["meta_info"]["output_token_logprobs"]]

    async def formed(
        self, prompt: list[int], tokens: int, form: dict[str, str], name: str = ""
    ) -> tuple[list[int], list[float]]:
        output = await self._ask(prompt, {"max_new_tokens": tokens, FORM: form}, name)
        return list(output["output_ids"]), [one[0] for one in output["meta_info"]["output_token_logprobs"]]

    async def score(self, prompt: list[int], tokens: list[int]) -> list[float]:
        params = {"temperature": 0, "max_new_tokens": 1}
        output = await self._ask([*prompt, *tokens], params, logprob_start_len=0)
        return [one[0] for one in output["meta_info"]["input_token_logprobs"][len(prompt) :]]

    async def cached(self, prompt: list[int], tokens: int) -> int:
        output = await self._ask(prompt, {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True})
        return int(output["meta_info"]["cached_tokens"])

    async def _ask(
        self, prompt: list[int], params: dict[str, Any], name: str = "", **more: Any
    ) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            rid=name or uuid.uuid4().hex,
            input_ids=prompt,
            sampling_params=params,
            return_logprob=True,
            **self._of_each_request,
            **more,
        )
        asked = self._engine.tokenizer_manager.generate_request(request, None)
        output: dict[str, Any] = [one async for one in asked][-1]
        return output

    def shutdown(self) -> None:
        # It looks every second whether a process has ended, and ends this one if so.
        if (watchdog := self._engine.tokenizer_manager._subprocess_watchdog) is not None:
            watchdog.stop()
        # SGLang ends all processes at once and waits for each; one whose parent, the fork server, has ended
        # before it may never be reaped.
        for child in active_children():
            child.kill()
            child.join()
        self._engine.shutdown()


class SGLangWithAdapters(SGLang):
    """Serves LoRA adapters of a rank, with the arguments that verl's server passes."""

    def __init__(self, model_dir: str, max_len: int, rank: int) -> None:
        from recipe.async_pipeline.verl_bridge.rollout.sglang import lora

        modules = lora.target_modules("all-linear")
        arguments: dict[str, Any] = {"max_lora_rank": rank, "lora_target_modules": modules}
        super().__init__(model_dir, max_len, enable_lora=True, **arguments)
        self._of_each_request = {"lora_path": lora.served_reference().lora_name}

    async def register(self) -> None:
        """Let requests name the adapter."""
        from recipe.async_pipeline.verl_bridge.rollout.sglang import lora

        await self._engine.tokenizer_manager.lora_registry.register(lora.served_reference())


ENGINES: dict[str, Callable[..., ProbedEngine]] = {
    "vllm": Vllm,
    "vllm-async": partial(Vllm, async_scheduling=True),
    "sglang": SGLang,
}
