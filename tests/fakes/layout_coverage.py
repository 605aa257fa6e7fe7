# SPDX-License-Identifier: Apache-2.0
"""How much an engine's own tables explain of each model, and whether they notice a loader's faults.

Run as a program: `layout_coverage vllm|sglang FOLDER [MODEL ...]` prints one line of JSON for each model.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from recipe.async_pipeline.errors import ProofError
from tests import HANG_S
from tests.fakes.engine_trees import use_tree

MODELS = (
    "qwen2-tied",
    "qwen3-untied",
    "llama",
    "glm4-fused",
    "qwen3-moe",
    "mixtral",
    "deepseek-v2-joined",
    "gpt-oss",
    "qwen2.5-vl",
)
FURTHER = (
    "phi3-fused",
    "mistral",
    "gemma2",
    "gemma3",
    "granite",
    "olmo2",
    "cohere2",
    "seed-oss",
    "olmoe",
    "qwen2-moe",
    "phimoe",
    "glm4-moe",
    "deepseek-v2",
    "deepseek-v3",
)
"""Models that only the nightly tests look at."""
SIZES = (1, 2)
"""Ranks of a replica. Faults are tried with the last."""
SAME_SHAPES = {"num_key_value_heads": 4}
"""As many as queries, so that the matrices of queries and keys can be confused."""

Weights = dict[str, torch.Tensor]
Named = tuple[str, torch.Tensor]
Fault = Callable[[str, torch.Tensor], Named]
"""What a wrong loader does with a published tensor before it loads it."""


def faults_of(weights: Weights) -> Iterator[tuple[str, Fault]]:
    """Yield the faults of loaders that are possible with a model, with their names."""
    layer = next(
        name
        for name in reversed(weights)
        if name.endswith(("q_proj.weight", "qkv_proj.weight", "q_b_proj.weight"))
    )
    if "qkv_proj" in layer:
        yield "q and k", _pick(layer, 0, torch.arange(weights[layer].shape[0]).roll(32))
    elif layer.replace("q_proj", "k_proj") in weights and "q_proj" in layer:
        yield "q and k", _exchange("q_proj", "k_proj", inside=layer.rpartition("q_proj")[0])
    else:
        name = layer.split(".")[-2]
        yield "q of two layers", _exchange(f".0.self_attn.{name}", f".1.self_attn.{name}")

    experts = [name for name in weights if ".experts." in name]
    stacked = [name for name in experts if name.endswith("experts.gate_up_proj")]
    fused = [name for name in weights if name.endswith("mlp.gate_up_proj.weight")]
    if stacked:
        alternate = torch.arange(weights[stacked[0]].shape[2]).view(-1, 2).flip(1).flatten()
        yield "gate and up", _pick(stacked[0], 2, alternate)
        yield "two experts", _pick(stacked[0], 0, torch.tensor([1, 0, 2, 3]))
    elif fused:
        rows = weights[fused[0]].shape[0]
        yield "gate and up", _pick(fused[0], 0, torch.arange(rows).roll(rows // 2))
    else:
        last = next(n for n in reversed(weights) if n.endswith((".gate_proj.weight", ".w1.weight")))
        pair = ("w1", "w3") if ".w1." in last else ("gate_proj", "up_proj")
        yield "gate and up", _exchange(*pair, inside=last.rpartition(pair[0])[0])
    if experts and not stacked:
        yield "two experts", _exchange("experts.0.", "experts.1.")


def _exchange(one: str, other: str, *, inside: str = "") -> Fault:
    def fault(name: str, tensor: torch.Tensor) -> Named:
        for old, new in ((one, other), (other, one)):
            if name.startswith(inside) and old in name:
                return name.replace(old, new), tensor
        return name, tensor

    return fault


def _pick(of: str, axis: int, order: torch.Tensor) -> Fault:
    return lambda name, tensor: (name, tensor.index_select(axis, order) if name == of else tensor)


def wrong(rank: Any, fault: Fault) -> Any:
    """Return an adapter whose loader has a fault."""
    load = rank.load

    def load_wrongly(pieces: Iterable[Sequence[Named]]) -> None:
        load([fault(name, tensor) for name, tensor in piece] for piece in pieces)

    rank.load = load_wrongly
    return rank


def coverage(name: str, folder: Path, engine: Any) -> dict[str, Any]:
    """Return the share of the served elements of a model that the tables explain, and the faults they miss.

    `engine` is the module with `ranks_of`, which makes new adapters of a replica, and `checkpoint_name`.
    """
    from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
    from recipe.async_pipeline.weight_sync.memory.board import await_manifest
    from recipe.async_pipeline.weight_sync.proof.map_check import check_map
    from tests.fakes import checkpoints
    from tests.fakes.adapter_contract import prove_first

    model, writer = checkpoints.make(name, folder, **SAME_SHAPES), ArenaWriter(1 << 20, 1000, None)
    try:
        # Sinks in bfloat16, as gpt-oss has them; SGLang serves them so in any case.
        weights = {
            engine.checkpoint_name(name): tensor.bfloat16() if name.endswith("sinks") else tensor
            for name, tensor in checkpoints.train(model, 1).items()
        }
        manifest = await_manifest(writer.gather(1, weights.items()), HANG_S)
        shares, unexplained = {}, set()
        for size in SIZES:
            ranks = engine.ranks_of(folder, size)
            prove_first(ranks, manifest)
            found = [check_map(manifest, rank.commit(manifest, 1 << 20)).coverage for rank in ranks]
            shares[size] = sum(one.explained for one in found) / sum(one.served for one in found)
            unexplained |= {tensor for one in found for tensor in one.unexplained}
        missed, seen = [], []
        for fault_name, fault in faults_of(weights):
            try:
                prove_first([wrong(rank, fault) for rank in engine.ranks_of(folder, SIZES[-1])], manifest)
                missed.append(fault_name)
            except ProofError as error:
                seen.append(f"{fault_name}: {error}")
    finally:
        writer.close()
    return {
        "share": min(shares.values()),
        "shares": shares,
        "unexplained": sorted(unexplained),
        "missed": missed,
        "seen": seen,
    }


def main(name_of_engine: str, folder: Path, models: Sequence[str]) -> None:
    use_tree()
    engine = importlib.import_module(f"tests.fakes.{name_of_engine}_models")
    for name in models or MODELS:
        try:
            report = coverage(name, folder / name, engine)
        except Exception:  # noqa: BLE001 - the other models are reported too
            report = {"error": traceback.format_exc()}
        sys.stdout.write(f"REPORT {json.dumps({'model': name, **report})}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
