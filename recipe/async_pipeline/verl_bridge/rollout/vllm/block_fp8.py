# SPDX-License-Identifier: Apache-2.0
"""Block-scaled fp8 weights of vLLM: converted from the published ones by verl's code, during generation or
while they are loaded.

Each block of a weight has one scale. For the proof, weights and scales are computed a second time, from the
whole published tensors and by the engine's tables of shards, and compared bit for bit. Kernels may keep
weights and scales in another layout; verl loads into buffers with the layout of a checkpoint and repacks
them afterwards. The proof is in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from verl.utils.kernel.fp8_kernel import scaled_fp8_blockwise
from verl.utils.vllm.vllm_quant_utils import (
    is_fp8_weight,
    is_quantized_model,
    load_quanted_weights,
    prepare_quanted_weights_for_loading,
    process_quanted_weights_after_loading,
)

from ....errors import ProofError
from ....weight_sync.engine.engine_adapter import Computed
from ....weight_sync.engine.standby import Convert, Converted, Named
from ....weight_sync.memory.manifest import TensorEntry
from ....weight_sync.proof.element_map import Piece, View
from ... import replaced
from ..served_layout import ServedLayout

FP8 = torch.float8_e4m3fn
SCALE = "_scale_inv"
"""Suffix of the scales of a weight: vLLM's name in a block-scaled checkpoint."""


class BlockFp8:
    """The fp8 weights of one rank's model."""

    def __init__(self, runner: Any, table: ServedLayout) -> None:
        """`runner` is vLLM's model runner, whose model must be built."""
        self._runner, self._table = runner, table
        self._block: tuple[int, int] = tuple(runner.vllm_config.quant_config.weight_block_size)
        self._dtype: torch.dtype = runner.vllm_config.model_config.dtype
        self._reload: Any = None
        self._names: tuple[str, ...] = ()
        """The published tensors of the last layout that this rank serves quantized."""

    @classmethod
    def of(cls, runner: Any, table: ServedLayout) -> BlockFp8 | None:
        """Return the fp8 weights of a model, or None if it is not quantized."""
        return cls(runner, table) if is_quantized_model(runner.vllm_config) else None

    def begin(self) -> None:
        """Give weights and scales the layout of a checkpoint, before the first piece of a load."""
        self._reload = prepare_quanted_weights_for_loading(self._runner.model)

    def convert_piece(self, piece: Sequence[Named], device: torch.device) -> list[Named]:
        """Quantize published tensors on a device, except for tensors that are served unquantized.

        verl's loader would do so where they are, but its kernel for GPUs cannot read host memory.
        """
        found: list[Named] = []
        for name, tensor in piece:
            if _is_converted(name, tensor) or not is_fp8_weight(name, self._runner.model):
                found.append((name, tensor))
            else:
                found += self._quantized(name, tensor, device)
        return found

    def load(self, piece: Sequence[Named]) -> None:
        """Load tensors that `convert_piece` or `conversion` returned."""
        with replaced.applied("fp8 that is converted already"):
            load_quanted_weights(piece, self._runner)

    def conversion(self, device: torch.device) -> Convert | None:
        """Return what quantizes the last layout's weights as `convert_piece` would; None before a load."""
        return partial(self._convert, device) if self._names else None

    def _convert(self, device: torch.device, published: Mapping[str, torch.Tensor]) -> Converted:
        return {name: self._quantized(name, published[name], device) for name in self._names}

    def _quantized(self, name: str, published: torch.Tensor, device: torch.device) -> list[Named]:
        values, scales = scaled_fp8_blockwise(published.to(device).to(self._dtype), self._block)
        return [(name, values), (name + SCALE, _by_block(scales))]

    def end(self) -> None:
        """Give weights and scales the layout of the kernels, after the proof of a load."""
        if self._reload is not None:
            process_quanted_weights_after_loading(self._runner.model, self._reload)
            self._reload = None

    def computed(self, layout: Sequence[TensorEntry], served: Mapping[str, torch.Tensor]) -> list[Computed]:
        """Return each quantized weight with its scales, and how both follow from the published tensors."""
        found: dict[str, dict[str, tuple[Piece, ...]]] = {}
        for entry in layout:
            expected = self._table.expected(entry)
            for piece in () if expected is None else expected.pieces:
                if served[piece.served].dtype is FP8:
                    of_weight = found.setdefault(piece.served, {})
                    of_weight[entry.name] = (*of_weight.get(entry.name, ()), piece)
        self._names = tuple(sorted({name for of_weight in found.values() for name in of_weight}))
        return [self._of_weight(weight, pieces, served) for weight, pieces in found.items()]

    def _of_weight(
        self, weight: str, pieces: Mapping[str, tuple[Piece, ...]], served: Mapping[str, torch.Tensor]
    ) -> Computed:
        return Computed(
            sources={name: tuple(piece.source for piece in own) for name, own in pieces.items()},
            served=(weight, weight + SCALE),
            compute=partial(self._compute, weight, pieces, served[weight], served[weight + SCALE]),
        )

    def _compute(
        self,
        weight: str,
        pieces: Mapping[str, tuple[Piece, ...]],
        served: torch.Tensor,
        served_scales: torch.Tensor,
        published: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Quantize whole tensors, then take this rank's shards. On the engine's device, as verl does."""
        values = torch.zeros(served.shape, dtype=torch.uint8, device=served.device).view(FP8)
        scales = torch.zeros(served_scales.shape, dtype=served_scales.dtype, device=served.device)
        for name, own in pieces.items():
            whole = published[name].to(served.device).to(self._dtype)
            quantized, scales_of_whole = scaled_fp8_blockwise(whole, self._block)
            of_blocks = _by_block(scales_of_whole)
            for piece in own:
                piece.target.of(values).copy_(piece.source.of(quantized.contiguous()))
                target = blocks_of(weight, piece.target, served.shape, self._block)
                source = blocks_of(name, piece.source, whole.shape, self._block)
                target.of(scales).copy_(source.of(of_blocks.contiguous()))
        return {weight: values, weight + SCALE: scales}


def _by_block(scales: torch.Tensor) -> torch.Tensor:
    """Return scales with one axis for each axis of the weight; verl's kernels differ in a third one."""
    return scales.reshape(scales.shape[:2])


def _is_converted(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dtype is FP8 or name.endswith(SCALE)


def unless_converted(stock: Callable[..., Iterator[Named]]) -> Callable[..., Iterator[Named]]:
    """Return verl's `quant_weights`, which leaves weights and scales alone that are quantized already."""

    def quant_weights(weights: Iterable[Named], *args: Any, **kwargs: Any) -> Iterator[Named]:
        published = []
        for name, tensor in weights:
            if _is_converted(name, tensor):
                yield name, tensor
            else:
                published.append((name, tensor))
        yield from stock(published, *args, **kwargs)

    return quant_weights


def blocks_of(name: str, view: View, shape: Sequence[int], block: tuple[int, int]) -> View:
    """Return the view of the scales that belongs to a view of a contiguous weight, or of a slot of one.

    Raises ProofError if the view cuts blocks in two, so that both parts would need a scale.
    """
    rows, columns = shape[-2:]
    slot, inside = divmod(view.offset, rows * columns)
    row, column = divmod(inside, columns)
    height, width = view.shape[-2:]
    whole_blocks = (
        view.stride[-2:] == (columns, 1)
        and row % block[0] == column % block[1] == 0
        and (height % block[0] == 0 or row + height == rows)
        and (width % block[1] == 0 or column + width == columns)
    )
    if not whole_blocks:
        raise ProofError(
            f"{name} is divided at row {row}, column {column}, into {height} x {width}, which cuts blocks of "
            f"{block[0]} x {block[1]}"
        )
    down, across = _ceil(rows, block[0]), _ceil(columns, block[1])
    offset = slot * down * across + row // block[0] * across + column // block[1]
    return View(offset, (_ceil(height, block[0]), _ceil(width, block[1])), (across, 1))


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
