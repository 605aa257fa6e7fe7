# SPDX-License-Identifier: Apache-2.0
"""Give Megatron the model's rotary base, which Megatron-Bridge before 0.4 loses.

transformers 5 keeps it in `rope_parameters`; the bridge reads `rope_theta`, finds none, and silently takes
10000: log-probs are then wrong on any device.
"""

from __future__ import annotations

from typing import Any


def set_rotary_base(engine_config: Any, hf_config: Any) -> None:
    """Set the base in the overrides of a Megatron engine's config, unless the user has set one."""
    from verl.utils.megatron_utils import get_hf_rope_theta

    try:
        base = get_hf_rope_theta(hf_config)
    except (AttributeError, ValueError):
        # A model without rotary embeddings.
        return
    engine_config.override_transformer_config.setdefault("rotary_base", base)
