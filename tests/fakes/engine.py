# SPDX-License-Identifier: Apache-2.0
"""A rollout engine with nothing but weights: what engines do to them, on one rank of several.

Fused, sharded, replicated, padded, cast, transposed, quantized and expert-parallel tensors, a tied head and a
buffer. `Fault`s make its loader wrong in the ways that loaders are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import torch

from recipe.async_pipeline.weight_sync.engine.engine_adapter import Computed, Expected
from recipe.async_pipeline.weight_sync.engine.recording_adapter import RecordingAdapter
from recipe.async_pipeline.weight_sync.memory.manifest import TensorEntry
from recipe.async_pipeline.weight_sync.proof.element_map import Piece, View

VOCABULARY, PADDED, HIDDEN, HEADS, KV_HEADS, HEAD, MLP, EXPERTS, INNER = 90, 96, 16, 4, 2, 4, 24, 4, 8
EMBED, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER = "model.layers.0"
ATTENTION, EXPERT = f"{LAYER}.self_attn", f"{LAYER}.mlp.experts"
BIAS, QUANTIZED = f"{LAYER}.mlp.gate.bias", f"{LAYER}.quantized.weight"
FUSED = {
    "qkv_proj": {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD},
    "gate_up_proj": {"gate": MLP, "up": MLP},
}
"""Parts and rows of fused tensors."""
Weights = dict[str, torch.Tensor]
Fault = Callable[["FakeEngine", list[tuple[str, torch.Tensor]]], list[tuple[str, torch.Tensor]]]


def weights(version: int, *, tied: bool = True, fused: bool = False, quantized: bool = False) -> Weights:
    """What a trainer publishes. `fused`: the parts of fused tensors as one, as in some checkpoints."""
    draw = torch.Generator().manual_seed(version)
    shapes: dict[str, tuple[int, ...]] = {EMBED: (VOCABULARY, HIDDEN)}
    rows = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
    if fused:
        shapes[f"{ATTENTION}.qkv_proj.weight"] = (sum(rows.values()), HIDDEN)
        shapes[f"{LAYER}.mlp.gate_up_proj.weight"] = (2 * MLP, HIDDEN)
    else:
        shapes |= {f"{ATTENTION}.{part}_proj.weight": (n, HIDDEN) for part, n in rows.items()}
        shapes |= {f"{LAYER}.mlp.{part}_proj.weight": (MLP, HIDDEN) for part in ("gate", "up")}
    shapes[f"{ATTENTION}.o_proj.weight"] = (HIDDEN, HIDDEN)
    shapes[f"{LAYER}.mlp.down_proj.weight"] = (HIDDEN, MLP)
    for expert in range(EXPERTS):
        shapes |= {f"{EXPERT}.{expert}.{part}_proj.weight": (INNER, HIDDEN) for part in ("gate", "up")}
        shapes[f"{EXPERT}.{expert}.down_proj.weight"] = (HIDDEN, INNER)
    shapes |= {BIAS: (EXPERTS,), "model.norm.weight": (HIDDEN,)}
    if quantized:
        shapes[QUANTIZED] = (HIDDEN, HIDDEN)
    if not tied:
        shapes[LM_HEAD] = (VOCABULARY, HIDDEN)
    return {name: torch.randn(*shape, generator=draw).bfloat16() for name, shape in shapes.items()}


class FakeEngine(RecordingAdapter):
    """One rank. `names`: whether it declares where tensors belong."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        tied: bool = True,
        experts_apart: bool = False,
        quantized: bool = False,
        names: bool = True,
    ) -> None:
        super().__init__(torch.device("cpu"))
        self.rank, self.size, self.names = rank, size, names
        self.fault: Fault | None = None
        self.skip_scale = False
        self.kv_rank, self.kv_size = (rank, size) if size <= KV_HEADS else (rank * KV_HEADS // size, KV_HEADS)
        experts = range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
        self.local = experts if experts_apart else range(EXPERTS)
        self.inner_rank, self.inner_size = (0, 1) if experts_apart else (rank, size)
        self.rows = {
            "q": HEADS * HEAD // size,
            "k": KV_HEADS * HEAD // self.kv_size,
            "v": KV_HEADS * HEAD // self.kv_size,
        }
        inner = INNER // self.inner_size
        shapes: dict[str, tuple[int, ...]] = {
            EMBED: (PADDED // size, HIDDEN),
            f"{ATTENTION}.qkv_proj.weight": (sum(self.rows.values()), HIDDEN),
            f"{ATTENTION}.o_proj.weight": (HIDDEN, HIDDEN // size),
            f"{LAYER}.mlp.gate_up_proj.weight": (2 * MLP // size, HIDDEN),
            # Stored transposed, as some kernels need it.
            f"{LAYER}.mlp.down_proj.weight": (MLP // size, HIDDEN),
            f"{EXPERT}.w13": (len(self.local), 2 * inner, HIDDEN),
            f"{EXPERT}.w2": (len(self.local), HIDDEN, inner),
            "model.norm.weight": (HIDDEN,),
        }
        if not tied:
            shapes[LM_HEAD] = (PADDED // size, HIDDEN)
        dummy = torch.Generator().manual_seed(100 + rank)
        self.held = {n: torch.randn(*s, generator=dummy).bfloat16() for n, s in shapes.items()}
        self.held[BIAS] = torch.randn(EXPERTS)  # a buffer in a wider dtype
        self.quantized = quantized
        if quantized:
            self.held[QUANTIZED] = torch.zeros(HIDDEN, HIDDEN, dtype=torch.int8)
            self.held[f"{QUANTIZED}_scale"] = torch.ones(HIDDEN)
        if tied:
            self.held[LM_HEAD] = self.held[EMBED]
        self.sealed = 0

    def move(self, device: torch.device, adopt: Callable[[Iterable[torch.Tensor], int], None]) -> None:
        """Have the weights in the memory of a device, which adopts them."""
        self.device = device
        adopt(self.held.values(), device.index)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return dict(self.held)

    def load(self, pieces: Iterable[Sequence[tuple[str, torch.Tensor]]]) -> None:
        given = list(chain.from_iterable(pieces))
        for name, tensor in given if self.fault is None else self.fault(self, given):
            self._load_one(name, tensor)

    def finish(self) -> None:
        pass

    def seal(self) -> None:
        self.sealed += 1

    def computed(self) -> Sequence[Computed]:
        if not self.quantized:
            return ()
        served = (QUANTIZED, f"{QUANTIZED}_scale")
        sources = {QUANTIZED: (View.whole((HIDDEN, HIDDEN)),)}
        return [
            Computed(
                sources,
                served,
                lambda published: dict(zip(served, quantize(published[QUANTIZED]), strict=True)),
            )
        ]

    def expected(self, entry: TensorEntry) -> Expected | None:
        if not self.names:
            return None
        whole = View.whole(entry.shape)
        return Expected(tuple(self._places(entry.name, whole)))

    def _load_one(self, name: str, tensor: torch.Tensor) -> None:
        module, _, part = name.removesuffix(".weight").rpartition(".")
        if name in (EMBED, LM_HEAD):
            self._load_rows(name, tensor)
        elif name == QUANTIZED:
            self._load_quantized(tensor)
        elif module.startswith(f"{EXPERT}."):
            self._load_expert(int(module.rpartition(".")[2]), part, tensor)
        elif part in FUSED:
            for own, rows in zip(FUSED[part], tensor.split(list(FUSED[part].values())), strict=True):
                self._load_one(f"{module}.{own}_proj.weight", rows)
        elif part in ("q_proj", "k_proj", "v_proj"):
            rank, size = (self.rank, self.size) if part[0] == "q" else (self.kv_rank, self.kv_size)
            parts = self.held[f"{module}.qkv_proj.weight"].split(list(self.rows.values()))
            parts["qkv".index(part[0])].copy_(tensor.chunk(size)[rank])
        elif part in ("gate_proj", "up_proj"):
            halves = self.held[f"{module}.gate_up_proj.weight"].chunk(2)
            halves[part == "up_proj"].copy_(tensor.chunk(self.size)[self.rank])
        elif part in ("o_proj", "down_proj"):
            columns = tensor.chunk(self.size, dim=1)[self.rank]
            self.held[name].copy_(columns if part == "o_proj" else columns.t())
        else:
            self.held[name].copy_(tensor)

    def _load_rows(self, name: str, tensor: torch.Tensor) -> None:
        height = PADDED // self.size
        rows = tensor[self.rank * height : (self.rank + 1) * height]
        self.held[name][: len(rows)].copy_(rows)
        self.held[name][len(rows) :].fill_(0)

    def _load_quantized(self, tensor: torch.Tensor) -> None:
        weight, scale = quantize(tensor)
        self.held[QUANTIZED].copy_(weight)
        if not self.skip_scale:
            self.held[f"{QUANTIZED}_scale"].copy_(scale)

    def _load_expert(self, expert: int, part: str, tensor: torch.Tensor) -> None:
        if expert not in self.local:
            return
        slot = self.local.index(expert)
        if part == "down_proj":
            self.held[f"{EXPERT}.w2"][slot].copy_(tensor.chunk(self.inner_size, dim=1)[self.inner_rank])
        else:
            halves = self.held[f"{EXPERT}.w13"][slot].chunk(2)
            halves[part == "up_proj"].copy_(tensor.chunk(self.inner_size)[self.inner_rank])

    def _places(self, name: str, whole: View) -> list[Piece]:
        """The same as `_load_one`, as views."""
        module, _, part = name.removesuffix(".weight").rpartition(".")
        if name in (EMBED, LM_HEAD):
            first = self.rank * PADDED // self.size
            count = max(0, min(PADDED // self.size, VOCABULARY - first))
            return [Piece(whole.narrow(0, first, count), name, self._view(name).narrow(0, 0, count))]
        if module.startswith(f"{EXPERT}."):
            return self._places_of_expert(int(module.rpartition(".")[2]), part, whole)
        if part in FUSED:
            found, start = [], 0
            for own, rows in FUSED[part].items():
                found += self._places(f"{module}.{own}_proj.weight", whole.narrow(0, start, rows))
                start += rows
            return found
        if part in ("q_proj", "k_proj", "v_proj"):
            rank = self.rank if part == "q_proj" else self.kv_rank
            count, place = self.rows[part[0]], sum(list(self.rows.values())[: "qkv".index(part[0])])
            target = self._view(f"{module}.qkv_proj.weight").narrow(0, place, count)
            return [Piece(whole.narrow(0, rank * count, count), f"{module}.qkv_proj.weight", target)]
        if part in ("gate_proj", "up_proj"):
            fused, count = f"{module}.gate_up_proj.weight", MLP // self.size
            target = self._view(fused).narrow(0, count * (part == "up_proj"), count)
            return [Piece(whole.narrow(0, self.rank * count, count), fused, target)]
        target = self._view(name)
        if part in ("o_proj", "down_proj"):
            count = whole.shape[1] // self.size
            whole = whole.narrow(1, self.rank * count, count)
        if part == "down_proj":
            target = View(0, target.shape[::-1], target.stride[::-1])
        return [Piece(whole, name, target)]

    def _places_of_expert(self, expert: int, part: str, whole: View) -> list[Piece]:
        if expert not in self.local:
            return []
        axis, count = (1 if part == "down_proj" else 0), INNER // self.inner_size
        source = whole.narrow(axis, self.inner_rank * count, count)
        served = f"{EXPERT}.{'w2' if part == 'down_proj' else 'w13'}"
        target = self._view(served).select(0, self.local.index(expert))
        if part != "down_proj":
            target = target.narrow(0, count * (part == "up_proj"), count)
        return [Piece(source, served, target)]

    def _view(self, name: str) -> View:
        return View.whole(self.held[name].shape)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eight-bit rows and their scales."""
    scale = weight.float().abs().amax(dim=1) / 127
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


# Faults of loaders.


def skipping(*names: str) -> Fault:
    """The loader ignores some tensors."""
    return lambda engine, piece: [(name, tensor) for name, tensor in piece if name not in names]


def swapping(a: str, b: str) -> Fault:
    """The loader puts each of two tensors where the other belongs."""
    other = {a: b, b: a}
    return lambda engine, piece: [(other.get(name, name), tensor) for name, tensor in piece]


def shard_of_next_rank(name: str) -> Fault:
    """The loader takes the rows of the next rank; the first rank's on the last."""

    def take(engine: FakeEngine, piece: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        for at, tensor in piece:
            if at == name:
                rank, engine.rank = engine.rank, (engine.rank + 1) % engine.size
                engine._load_one(at, tensor)
                engine.rank = rank
        return [(at, tensor) for at, tensor in piece if at != name]

    return take
