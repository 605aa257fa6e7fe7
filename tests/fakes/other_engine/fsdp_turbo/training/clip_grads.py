# SPDX-License-Identifier: Apache-2.0
"""The norm of gradients."""

from __future__ import annotations

from typing import Any

from torch.nn.utils import clip_grad_norm_


def clip_grad_norm(model: Any, max_norm: float) -> float:
    return float(clip_grad_norm_(model.parameters(), max_norm).full_tensor())
