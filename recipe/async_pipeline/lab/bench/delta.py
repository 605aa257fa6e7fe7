# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline bench delta`: measure what the differences of consecutive versions save, and cost.

It needs torch and transformers alone. Two models are trained with AdamW on float32 weights, and their
weights are cast as for a weight update: the model of the smoke run on its own task, at the smoke run's
learning rate, and a larger untrained one on random tokens, at `--lr`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ...console import echo
from ...errors import ConfigError
from ...weight_sync.hosts.delta import apply, difference
from ..tables import render_spread, render_table, spread
from ..tasks.build import ToySpec, ensure_toy
from .measuring.machine import machine
from .results.outputs import check_outputs

SMOKE_LR = 3.0e-4
HIDDEN, LAYER_PARAMS, VOCABULARY = 512, 2_850_000, 8192
"""Shape of the untrained model: parameters of a layer follow from the width."""
BATCH, LENGTH = 4, 128
MEASURED = ("changed", "ratio", "encode_gb_s", "apply_gb_s")

TokensAndLabels = tuple[torch.Tensor, torch.Tensor]
"""Token ids and labels."""


class Update(NamedTuple):
    """One update of a model's weights, published in one dtype."""

    changed: float
    """Share of the elements whose bits changed."""
    ratio: float
    """Bytes of the weights per byte sent, 1 if they are sent whole."""
    encode_gb_s: float
    """GB of weights that a second of one core turns into a delta."""
    apply_gb_s: float | None
    """GB of weights that a second of one core restores from it, or None if they are sent whole."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline bench delta`."""
    parser.add_argument(
        "--params",
        default="40M",
        metavar="N",
        help="parameters of the untrained model (default: %(default)s)",
    )
    parser.add_argument(
        "--lr", type=float, default=1e-6, help="learning rate of the untrained model (default: %(default)s)"
    )
    parser.add_argument(
        "--updates",
        type=int,
        default=4,
        metavar="N",
        help="optimizer steps to measure of each model (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=Path, default=argparse.SUPPRESS, metavar="FILE", help="write all results to FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Measure both models. Raises ConfigError if an option is invalid."""
    params = _count(args.params)
    if args.updates < 1 or not args.lr > 0:
        raise ConfigError(f"--updates must be >= 1 and --lr > 0, got {args.updates} and {args.lr}")
    check_outputs(args.json, None, None)

    data: dict[str, Any] = {"machine": machine(), "models": {}}
    for name, make, lr, dtypes in (
        ("smoke run", smoke_model, SMOKE_LR, (torch.float32, torch.bfloat16)),
        ("untrained", partial(untrained_model, params), args.lr, (torch.bfloat16,)),
    ):
        model, batches = make()
        found = measure(model, batches, lr, args.updates, dtypes)
        size = sum(parameter.numel() for parameter in model.parameters())
        data["models"][name] = {"params": size, "lr": lr, "updates": found}
        if args.json:
            args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    echo(table(data))
    return 0


def measure(
    model: Any, batches: Iterator[TokensAndLabels], lr: float, updates: int, dtypes: Sequence[torch.dtype]
) -> dict[str, list[dict[str, Any]]]:
    """Train for some steps; return each update's figures by dtype. Each delta is applied and compared."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    found: dict[str, list[dict[str, Any]]] = {_name(dtype): [] for dtype in dtypes}
    before = {dtype: published(model, dtype) for dtype in dtypes}
    for _ in range(updates):
        ids, labels = next(batches)
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for dtype in dtypes:
            after = published(model, dtype)
            found[_name(dtype)].append(compared(before[dtype], after, dtype.itemsize)._asdict())
            before[dtype] = after
    return found


def compared(base: np.ndarray[Any, Any], target: np.ndarray[Any, Any], item_bytes: int) -> Update:
    """Return the figures of one update."""
    word = {2: np.uint16, 4: np.uint32}[item_bytes]
    changed = float(np.mean(base.view(word) != target.view(word)))
    encode_s, coded = _cpu_seconds(lambda: difference(base, target, item_bytes))
    gigabytes = len(target) / 1e9
    if coded is None:
        return Update(changed, 1.0, gigabytes / encode_s, None)

    out = np.zeros_like(target)
    apply_s, _ = _cpu_seconds(lambda: apply(coded, base, out))
    assert np.array_equal(out, target), "the delta restores every bit"
    return Update(changed, len(target) / len(coded), gigabytes / encode_s, gigabytes / apply_s)


def published(model: Any, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """Return the bytes of all weights, as a weight update casts them."""
    whole = torch.cat([parameter.detach().flatten().to(dtype) for parameter in model.parameters()])
    found: np.ndarray[Any, Any] = whole.view(torch.uint8).numpy()
    return found


def smoke_model() -> tuple[Any, Iterator[TokensAndLabels]]:
    """Return the model of the smoke run, and batches of its task."""
    from transformers import AutoTokenizer, Qwen2ForCausalLM

    from ..tasks.task import split_problems
    from ..tasks.warmup import collate, encode_example

    spec = ToySpec.of(seed=0, tied=True)
    toy = ensure_toy(spec, Path(".cache/toy").resolve(), report=partial(echo, file=sys.stderr))
    tokenizer = AutoTokenizer.from_pretrained(toy.dir / "model")
    model = Qwen2ForCausalLM.from_pretrained(toy.dir / "model", dtype=torch.float32)
    problems, chance = split_problems(spec.task, spec.seed).train, random.Random(0)

    def batches() -> Iterator[TokensAndLabels]:
        while True:
            drawn = [encode_example(tokenizer, one, one.answer) for one in chance.choices(problems, k=64)]
            ids, labels = collate(drawn, tokenizer.pad_token_id)
            yield torch.tensor(ids), torch.tensor(labels)

    return model, batches()


def untrained_model(params: int) -> tuple[Any, Iterator[TokensAndLabels]]:
    """Return a model of about `params` parameters, and random tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    layers = max(1, round((params - VOCABULARY * HIDDEN) / LAYER_PARAMS))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN - HIDDEN // 2,
        num_hidden_layers=layers,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 256,
        tie_word_embeddings=True,
    )

    def batches() -> Iterator[TokensAndLabels]:
        while True:
            ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
            yield ids, ids

    return Qwen2ForCausalLM(config).float(), batches()


def table(data: Mapping[str, Any]) -> str:
    """Return a Markdown table: medians [min .. max] over the updates."""
    header = ["model", "parameters", "learning rate", "published as", "changed elements", "ratio"]
    rows = [
        [
            name,
            f"{model['params'] / 1e6:.1f} M",
            f"{model['lr']:g}",
            dtype,
            *(_cell([update[of] for update in updates], of) for of in MEASURED),
        ]
        for name, model in data["models"].items()
        for dtype, updates in model["updates"].items()
    ]
    return render_table([*header, "encode, GB/s per core", "apply, GB/s per core"], rows)


def _cell(values: Sequence[float | None], of: str) -> str:
    known = [value for value in values if value is not None]
    return render_spread(spread(known), ".1%" if of == "changed" else ".1f") if known else "sent whole"


def _cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU time of this process's threads, which other processes do not change, and the result."""
    started = time.process_time()
    result = work()
    return max(time.process_time() - started, 1e-9), result


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(text: str) -> int:
    """Return the number of parameters that `--params` asks for. Raises ConfigError if it is none."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9}
    try:
        count = float(text.rstrip("KMB")) * units.get(text[-1:], 1)
    except ValueError:
        count = 0
    if not VOCABULARY * HIDDEN <= count < 1e10:
        raise ConfigError(f"--params must be a number from 5M to 10B such as 40M, got {text!r}")
    return int(count)
