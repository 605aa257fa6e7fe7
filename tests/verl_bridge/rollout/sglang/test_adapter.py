# SPDX-License-Identifier: Apache-2.0
"""SGLang's own models and loaders, rank by rank, keep the contract of engine adapters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import REPOSITORY


@pytest.mark.real_engine
def test_the_contract_of_adapters_holds(tmp_path: Path) -> None:
    """Four ranks are more than the two heads of keys and values. The adapters are LoRA adapters.

    On the simulated device, host tensors reach it by copies only.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.sglang_models", str(tmp_path)],
        env={**os.environ, "VERL_PLATFORM": "cpu"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    whole = ("qwen2-tied", "qwen3-untied", "llama", "qwen3-moe", "phi3-fused")
    adapters = [f"adapters of {name} on {size}" for name in ("qwen2-tied", "llama") for size in (1, 2, 4)]
    joined = [f"deepseek-v2-joined on {size}" for size in (1, 2)]
    on_a_device = ["qwen2-tied on 2 with a device"]
    on_the_host = [f"{name} on {size}" for name in whole for size in (1, 2, 4)]
    assert done.stdout.splitlines() == on_the_host + joined + adapters + on_a_device
