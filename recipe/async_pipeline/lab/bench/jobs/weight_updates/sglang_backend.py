# SPDX-License-Identifier: Apache-2.0
"""The checkpoint engine `dual_buffer` for verl's own workers with SGLang.

verl imports this module in each of them, before SGLang, whose stubs on a CPU must be in place by then.
"""

from __future__ import annotations

from .....verl_bridge.rollout import sglang
from .....verl_bridge.weights.checkpoint_engine import DualBufferCheckpointEngine

__all__ = ["DualBufferCheckpointEngine", "sglang"]
