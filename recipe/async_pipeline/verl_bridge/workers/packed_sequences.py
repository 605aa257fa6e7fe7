# SPDX-License-Identifier: Apache-2.0
"""Train packed sequences where flash-attn is not installed.

verl joins the sequences of a micro-batch. transformers' sdpa then gets a mask over all pairs of its tokens,
and verl computes log-probs row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ...errors import ConfigError
from .attention import INSTEAD

CHUNK = 2**26
"""Logits of which temporary copies exist at a time: 256 MB."""


@dataclass(frozen=True)
class Sequences:
    """Where the sequences of a micro-batch begin and end; models pass it on in place of a mask."""

    bounds: torch.Tensor
    """Cumulative lengths, int32, on the device of the model."""
    ends: tuple[int, ...]
    """The same for the host."""
    window: int | None

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest sequence."""
        return max(end - begin for begin, end in pairwise(self.ends))

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yield first query, end, and first key of pieces that attention can be computed in."""
        for begin, end in pairwise(self.ends):
            for first in range(begin, end, self.window or end - begin):
                last = min(first + self.window, end) if self.window else end
                yield first, last, max(begin, first - self.window + 1) if self.window else begin


def register_attention() -> None:
    """Make the attention available to transformers, by name. Idempotent."""
    AttentionInterface.register(INSTEAD, packed_attention)
    AttentionMaskInterface.register(INSTEAD, sequences_of)


def sequences_of(**described: Any) -> Sequences | torch.Tensor | None:
    """Return the sequences of a packed micro-batch, or sdpa's mask of any other batch.

    transformers calls this once for each kind of layer; it describes the mask as a function of two tokens.
    """
    length, attends = described["q_length"], described["mask_function"]
    later = torch.arange(1, length, device=described["device"])
    packed = (
        described["batch_size"] == 1
        and described["kv_length"] == length
        and described["attention_mask"] is None
        and not described.get("use_vmap")
    )
    if not packed or attends(0, 0, later - 1, later).any():
        return sdpa_mask(**described)
    ends = torch.nn.functional.pad(later[~attends(0, 0, later, later - 1)], (1, 0))
    ends = torch.cat([ends, ends.new_tensor([length])])
    return Sequences(ends.int(), tuple(ends.tolist()), described.get("local_size"))


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Sequences | torch.Tensor | None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention within each sequence, in transformers' form: batch, tokens, heads, values.

    Raises ConfigError if the model limits the scores, which sdpa would ignore.
    """
    if others.get("softcap") is not None:
        raise ConfigError(f"{INSTEAD} cannot train a model with softcap; install flash-attn")
    sequences = attention_mask
    if not isinstance(sequences, Sequences):
        output, _ = sdpa_attention_forward(module, query, key, value, sequences, **others)
        return output, None
    if dtype := _kernel_dtype(query, value, others.get("dropout", 0.0)):
        rows = [tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value)]
        return _varlen(rows, sequences, others.get("scaling"))[None], None
    parts = []
    for first, last, low in sequences.pieces():
        mask = None
        if low != first and sequences.window:
            pairs = query.new_ones(last - first, last - low, dtype=torch.bool)
            mask = pairs.tril(first - low).triu(first - low - sequences.window + 1)
        part = query[:, :, first:last], key[:, :, low:last], value[:, :, low:last]
        parts.append(sdpa_attention_forward(module, *part, mask, **others)[0])
    return torch.cat(parts, 1), None


def _kernel_dtype(query: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.dtype | None:
    """Return the type in which torch's kernel for packed sequences computes, or None if it cannot."""
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    usable = (
        device == "cuda"
        and torch.__version__ >= (2, 13)
        and dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= 256
        and not dropout
    )
    return dtype if usable else None


def _varlen(rows: list[torch.Tensor], sequences: Sequences, scaling: float | None) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window = (sequences.window - 1 if sequences.window else -1, 0)
    bounds, longest = sequences.bounds, sequences.longest
    return varlen_attn(
        *rows, bounds, bounds, longest, longest, scale=scaling, window_size=window, enable_gqa=True
    )


class _LogProbs(torch.autograd.Function):
    """Computes in float32, as flash-attn does, and keeps no copy of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        totals = torch.cat([part.float().logsumexp(-1, keepdim=True) for part in _chunks(logits)])
        ctx.save_for_backward(logits, labels, totals)
        return logits.gather(-1, labels).float() - totals

    @staticmethod
    def backward(ctx: Any, weights: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, labels, totals = ctx.saved_tensors
        result = torch.empty_like(logits)
        rows = len(_chunks(logits)[0])
        others = (tensor.split(rows) for tensor in (logits, labels, totals, weights))
        for out, part, label, total, weight in zip(_chunks(result), *others, strict=True):
            out.copy_((part.float() - total).exp_().mul_(-weight).scatter_add_(-1, label, weight))
        return result, None


def _chunks(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    chunks: tuple[torch.Tensor, ...] = logits.split(max(1, CHUNK // logits.shape[-1]))
    return chunks


def log_probs_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of each label, in float32. `logits` has one dimension more than `labels`."""
    flat = _LogProbs.apply(logits.flatten(0, -2), labels.flatten()[:, None])
    return flat.view(labels.shape)
