# SPDX-License-Identifier: Apache-2.0
"""The arguments are the ones that verl's servers give; each is looked up in their source."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from recipe.async_pipeline.lab.gpu_kit.verls_arguments import (
    FLASHINFER_SINCE,
    GRAPHS,
    OF_ROLLOUT,
    sglang_arguments,
    vllm_arguments,
)

pytestmark = pytest.mark.real_engine


def source_of(name: str) -> str:
    """Return the source of a module below verl's rollouts, without importing its engine."""
    verl = importlib.util.find_spec("verl")
    assert verl is not None and verl.origin is not None
    return (Path(verl.origin).parent / "workers" / "rollout" / name).read_text(encoding="utf-8")


def test_vllm_gets_what_verls_server_gives() -> None:
    source = source_of("vllm_rollout/vllm_async_server.py")
    assert [name for name in OF_ROLLOUT if f'"{name}": self.config.{name},' not in source] == []
    for name, value in GRAPHS.items():
        assert f'compilation_config.setdefault("{name}", "{value}")' in source
    assert vllm_arguments(on_cpu=False) == {
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "enable_sleep_mode": True,
        "enforce_eager": False,
        "logprobs_mode": "processed_logprobs",
        "max_num_batched_tokens": 8192,
        "compilation_config": GRAPHS,
    }
    on_cpu = vllm_arguments(on_cpu=True)
    assert on_cpu["enforce_eager"] and not on_cpu["enable_sleep_mode"]


def test_sglang_gets_what_verls_server_gives() -> None:
    source = source_of("sglang_rollout/async_sglang_server.py")
    assert '"enable_memory_saver": True,' in source
    since = ".".join(map(str, FLASHINFER_SINCE))
    chosen = re.search(r"if attention_backend is None:.*?fa3\"\n", source, re.DOTALL)
    assert chosen and f'>= version.parse("{since}")' in chosen[0]
    assert re.findall(r'attention_backend = "(\w+)"', chosen[0]) == [
        "aiter",  # on AMD's GPUs
        sglang_arguments(since)["attention_backend"],
        sglang_arguments("0.5.11")["attention_backend"],
    ]
    assert sglang_arguments("0.5.12.post1") == {
        "enable_memory_saver": True,
        "attention_backend": "flashinfer",
    }
