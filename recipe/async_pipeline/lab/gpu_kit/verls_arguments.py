# SPDX-License-Identifier: Apache-2.0
"""Arguments that verl 0.9.1 gives to an engine by default and that choose its paths on a GPU.

verl builds them inside its servers, which need Ray. A check of an engine alone takes them from here, so that
it records the graphs, allocates from the memory and computes the log-probs of a run.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

OF_ROLLOUT = (
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enable_sleep_mode",
    "enforce_eager",
    "logprobs_mode",
    "max_num_batched_tokens",
)
"""What vLLM gets from the section of the rollout, by the same names."""
GRAPHS = {"cudagraph_mode": "FULL_AND_PIECEWISE"}
FLASHINFER_SINCE = (0, 5, 12)
"""The release of SGLang from which verl does not choose `fa3`."""


def vllm_arguments(*, on_cpu: bool) -> dict[str, Any]:
    """Return what verl gives to vLLM, as the configuration for CPUs changes it on a CPU."""
    from verl.workers.config import RolloutConfig

    defaults = {field.name: field.default for field in fields(RolloutConfig)}
    given = {name: defaults[name] for name in OF_ROLLOUT} | {"compilation_config": GRAPHS}
    return given | {"enforce_eager": True, "enable_sleep_mode": False} if on_cpu else given


def sglang_arguments(version: str) -> dict[str, Any]:
    """Return what verl gives to a release of SGLang on NVIDIA's GPUs; a run replaces it on a CPU."""
    release = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    attention = "flashinfer" if release >= FLASHINFER_SINCE else "fa3"
    return {"enable_memory_saver": True, "attention_backend": attention}
