# SPDX-License-Identifier: Apache-2.0
"""Load a checkpoint into an engine alone, in bfloat16 and with tensor parallelism, and generate with it.

    python -m recipe.async_pipeline.verl_bridge.engine_check --engine vllm --model PATH --ranks 2 --json FILE

It shows that driver, communication library and engine fit together, before a run needs all of them. Not
verified on a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PROMPT = [1, 2, 3, 4]
NEW_TOKENS = 8
CONTEXT = 64


def with_vllm(model: str, ranks: int, device: str) -> Callable[[], list[int]]:
    """Load the checkpoint; return what generates."""
    from vllm import LLM, SamplingParams

    # On GPUs the default; a CPU engine of one rank would otherwise run in this process.
    more = {"distributed_executor_backend": "mp"} if device == "cpu" else {"gpu_memory_utilization": 0.5}
    llm = LLM(
        model,
        dtype="bfloat16",
        tensor_parallel_size=ranks,
        enforce_eager=True,
        max_model_len=CONTEXT,
        skip_tokenizer_init=True,
        **more,
    )
    asked = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.0, detokenize=False)

    def generate() -> list[int]:
        (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], asked, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    return generate


def with_sglang(model: str, ranks: int, device: str) -> Callable[[], list[int]]:
    """Load the checkpoint; return what generates. `device` must be cuda."""
    from sglang import Engine

    engine = Engine(
        model_path=model,
        dtype="bfloat16",
        tp_size=ranks,
        context_length=CONTEXT,
        mem_fraction_static=0.5,
        skip_tokenizer_init=True,
    )
    asked = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0.0}

    def generate() -> list[int]:
        return list(engine.generate(input_ids=PROMPT, sampling_params=asked)["output_ids"])

    return generate


ENGINES: Mapping[str, Callable[[str, int, str], Callable[[], list[int]]]] = {
    "vllm": with_vllm,
    "sglang": with_sglang,
}


def main(arguments: Sequence[str]) -> int:
    """Load and generate twice. Returns 1 if a response has not the requested length, else 0."""
    parser = argparse.ArgumentParser(prog="engine_check")
    parser.add_argument("--engine", choices=tuple(ENGINES), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(arguments)

    started = time.perf_counter()
    generate = ENGINES[args.engine](args.model, args.ranks, args.device)
    loaded = time.perf_counter()
    answers = [generate() for _ in range(2)]
    found: dict[str, Any] = {
        "engine": args.engine,
        "ranks": args.ranks,
        "load_s": loaded - started,
        "generate_s": (time.perf_counter() - loaded) / len(answers),
        "tokens": [len(answer) for answer in answers],
    }
    args.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return 0 if found["tokens"] == [NEW_TOKENS, NEW_TOKENS] else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
