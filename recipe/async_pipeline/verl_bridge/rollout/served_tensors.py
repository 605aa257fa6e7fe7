# SPDX-License-Identifier: Apache-2.0
"""Which tensors of an engine's model a load is responsible for, and which the engine computes from them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...errors import ProofError


def require_fresh_products(model: torch.nn.Module) -> None:
    """Raises ProofError if a layer of latent attention computes with other weights than its kv_b_proj has.

    Engines keep both halves of kv_b_proj as separate matrices, as views or as copies.
    """
    for path, module in model.named_modules():
        weight = getattr(getattr(module, "kv_b_proj", None), "weight", None)
        for names in PRODUCTS:
            keys, values = (getattr(module, name, None) for name in names)
            if weight is None or keys is None or values is None or weight.dtype.itemsize == 1:
                continue
            halves = weight.detach().view(keys.shape[0], -1, keys.shape[2]).to(keys.dtype)
            size = keys.shape[1]
            fresh = torch.equal(keys, halves[:, :size]), torch.equal(values, halves[:, size:].transpose(1, 2))
            for name, same in zip(names, fresh, strict=True):
                if not same:
                    raise ProofError(
                        f"{path}.{name} does not follow from {path}.kv_b_proj.weight; the engine still "
                        "computes with an older version of it"
                    )


PRODUCTS = (("W_UK_T", "W_UV"), ("w_kc", "w_vc"))
"""What engines call the halves of kv_b_proj: [head, key, latent] and [head, latent, value]."""


def _is_product(module: torch.nn.Module, leaf: str) -> bool:
    return hasattr(module, "kv_b_proj") and any(leaf in names for names in PRODUCTS)


def served_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and persistent buffer that a load is responsible for, aliases included.

    Without what the engine computes from them; see `require_fresh_products`.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        if not _is_product(model.get_submodule(path), leaf):
            yield name, parameter
    for path, module in model.named_modules(remove_duplicate=False):
        kept = module._buffers.keys() - module._non_persistent_buffers_set
        for leaf in module._buffers:
            buffer = module._buffers[leaf]
            if leaf in kept and leaf not in OWN_BUFFERS and buffer is not None:
                yield f"{path}.{leaf}" if path else leaf, buffer


OWN_BUFFERS = {
    # Scales of attention layers, which belong to the KV cache.
    *("_q_scale", "_k_scale", "_v_scale", "_prob_scale"),
    # Which expert is on which rank: persistent in vLLM 0.24, so newer ones may rename them.
    *("_expert_map", "expert_mask"),
    *("expert_global_to_physical", "expert_physical_to_global", "expert_local_to_global"),
}
"""Buffers that the engine computes itself; they belong to no checkpoint."""
