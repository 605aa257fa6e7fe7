# SPDX-License-Identifier: Apache-2.0
"""The transformer layer of the CPU platform: megatron-core's own layers, with torch's attention and norm.

Megatron-core's layers without Transformer Engine refuse packed sequences (attention) and sequence parallelism
(norm), and number their experts in a way that Megatron-Bridge 0.3.1 does not understand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build


class RMSNorm(torch.nn.RMSNorm):
    """torch's norm, marked for the gradient sum of sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Attention(MegatronModule):  # type: ignore[misc]
    """Causal attention by torch, of padded rows (bshd) and of packed rows (thd)."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config)
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Return the values that each position attends to, its heads joined in the last dimension.

        Padded: [sequence, row, head, size]; rows are padded on the right, so the causal mask suffices.
        Packed: [token, head, size], with the rows' first tokens in `packed_seq_params`.
        """
        if packed_seq_params is None:
            return self._attend(query, key, value).flatten(2).contiguous()
        bounds = packed_seq_params.cu_seqlens_q_padded
        bounds = (packed_seq_params.cu_seqlens_q if bounds is None else bounds).tolist()
        rows = [
            self._attend(query[a:b, None], key[a:b, None], value[a:b, None])[:, 0]
            for a, b in zip(bounds, bounds[1:], strict=False)
            if b > a
        ]
        # Tokens that fill the batch up for tensor parallelism belong to no row.
        if rest := query.shape[0] - bounds[-1]:
            rows.append(query.new_zeros(rest, *query.shape[1:2], value.shape[-1]))
        return torch.cat(rows).flatten(1).contiguous()

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend within rows of [sequence, row, head, size]."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return attended.permute(2, 0, 1, 3)


class _GroupedLinear(torch.nn.Module):
    """The linear layers of a rank's experts, with the parameters of Transformer Engine: weight0, weight1, ...

    Those are the names of production, so the same mapping of Megatron-Bridge converts them.
    """

    split_dim: int
    """The dimension of a weight that expert tensor parallelism splits."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        super().__init__()
        if bias:
            raise NotImplementedError("experts with a bias are not supported on the CPU platform")
        shape = [output_size, input_size]
        shape[self.split_dim] //= pg_collection.expt_tp.size()
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            if config.perform_initialization:
                init_method(weight)
            # What megatron-core's optimizer and gradient norm read from a parameter.
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]
            weight.partition_dim = self.split_dim  # type: ignore[attr-defined]
            weight.partition_stride = 1  # type: ignore[attr-defined]
            self.register_parameter(f"weight{number}", weight)
        self.num_gemms = num_gemms

    def forward(self, tokens: torch.Tensor, num_tokens: Sequence[int]) -> tuple[torch.Tensor, None]:
        """Apply each expert to its tokens, which are in the order of the experts."""
        parts = tokens.split(list(num_tokens))
        return torch.cat([F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)]), None


class ColumnGroupedLinear(_GroupedLinear):
    """Experts' linear layers whose outputs are split."""

    split_dim = 0


class RowGroupedLinear(_GroupedLinear):
    """Experts' linear layers whose inputs are split."""

    split_dim = 1


def layer_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage, as a provider's `transformer_layer_spec`."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = Attention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.num_moe_experts:
        AutoMapping.register_module_type("ColumnGroupedLinear", "column")
        AutoMapping.register_module_type("RowGroupedLinear", "row")
        parts.mlp.submodules.experts = ModuleSpec(
            module=TEGroupedMLP,
            submodules=MLPSubmodules(linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear),
        )
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage), layer_norm=RMSNorm
    )
