# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline bench attention`: measure what a packed micro-batch costs without flash-attn.

A small Qwen2 computes log-probs and their gradients, with transformers' sdpa and with this package's
attention. It takes CPU time, which other programs on the machine hardly change.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from ...console import echo
from ...errors import ConfigError
from ..tables import Spread, paired_ratio, render_spread, render_table, spread
from .measuring.machine import machine
from .results.outputs import check_outputs

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ARMS = ("sdpa", "packed_sdpa")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline bench attention`."""
    for option, default, text in (
        ("--tokens", 8192, "tokens of the micro-batch (default: %(default)s)"),
        ("--sequences", 16, "sequences of it, all of one length (default: %(default)s)"),
        ("--turns", 3, "measurements of each, in turn, after one to warm up (default: %(default)s)"),
    ):
        parser.add_argument(option, type=int, default=default, metavar="N", help=text)
    parser.add_argument(
        "--json", type=Path, default=argparse.SUPPRESS, metavar="FILE", help="write all results to FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Measure both. Raises ConfigError if an option is invalid."""
    if min(args.sequences, args.turns) < 1 or args.tokens < 2 * args.sequences:
        raise ConfigError(
            f"--sequences and --turns must be >= 1 and --tokens at least twice --sequences, "
            f"got {args.sequences}, {args.turns} and {args.tokens}"
        )
    check_outputs(args.json, None, None)
    taken = measure(args.tokens, args.sequences, args.turns)
    found = {name: spread(values) for name, values in taken.items()}
    ratio = paired_ratio(*(taken[name] for name in ARMS))
    if args.json:
        data = {"machine": machine(), "cpu_s": taken, "ratio": ratio._asdict()}
        args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    echo(table(found, ratio))
    return 0


def measure(tokens: int, sequences: int, turns: int) -> dict[str, list[float]]:
    """Return CPU seconds of log-probs and gradients of each turn, by attention."""
    from ...verl_bridge.workers.packed_sequences import log_probs_of, register_attention

    register_attention()
    models = {name: _model(name, tokens) for name in ARMS}
    positions = torch.arange(tokens)[None] % -(-tokens // sequences)
    ids = torch.randint(0, SIZES["vocab_size"], positions.shape, generator=torch.Generator().manual_seed(0))

    taken: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(turns + 1):
        for name in ARMS:
            begun = time.process_time()
            logits = models[name](input_ids=ids, position_ids=positions, use_cache=False).logits
            log_probs_of(logits, ids.roll(-1, 1)).mean().backward()
            taken[name].append(time.process_time() - begun)
    return {name: values[1:] for name, values in taken.items()}


def table(found: dict[str, Spread], ratio: Spread) -> str:
    """Return the Markdown table of all results."""
    rows = [[name, render_spread(values, ".2f")] for name, values in found.items()]
    of_cpu = render_table(["attention", "CPU s"], rows)
    return f"{of_cpu}\n\nsdpa takes {render_spread(ratio, '.1f')} times as much."


def _model(attention: str, tokens: int) -> Any:
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(**SIZES, max_position_embeddings=tokens)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
