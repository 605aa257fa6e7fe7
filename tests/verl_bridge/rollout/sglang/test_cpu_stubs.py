# SPDX-License-Identifier: Apache-2.0
"""SGLang runs on the CPU platform with the stubs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

IMPORT = "import sglang.srt.managers.scheduler"
SEND = """
from multiprocessing.reduction import ForkingPickler
import torch
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
monkey_patch_torch_reductions()
ForkingPickler.dumps(torch.zeros(1))
"""
DUMPER = """
import sys
import sglang.srt.debug_utils.dumper
assert "megatron.core" not in sys.modules
"""
MODULE = "recipe.async_pipeline.verl_bridge.rollout.sglang.cpu_stubs"


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


PINNED = """
import importlib, inspect, torch
from recipe.async_pipeline.verl_bridge.replaced import REPLACED
pinning = [row.module for row in REPLACED["SGLang's scheduler on a CPU"] if row.name == "torch"]
for name in pinning:
    source = inspect.getsource(importlib.import_module(name))
    assert "pin_memory=" in source or ".pin_memory()" in source, f"{name} pins nothing: take it out"
tensor = torch.zeros(1)
try:
    tensor.pin_memory()
except RuntimeError:
    pass
else:
    raise AssertionError("torch's CPU build can pin memory: delete the stub")
stubs.without_pinning()
for name in pinning:
    module = importlib.import_module(name)
    assert module.torch.tensor([1, 2], pin_memory=True).tolist() == [1, 2]
    assert module.torch.zeros((1,), pin_memory=True).tolist() == [0]
    assert module.torch.float32 is torch.float32
assert tensor.pin_memory() is tensor
"""


@pytest.mark.real_engine
def test_with_all_stubs_sglang_is_imported_sends_tensors_and_pins_no_memory() -> None:
    """In one process, since the import takes long. Scoring a prompt would pin memory, and LoRA adapters."""
    lines = f"import {MODULE} as stubs\nstubs.install()\n{IMPORT}\n{DUMPER}\n{SEND}\n{PINNED}"
    done = run(lines, VERL_PLATFORM="")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("platform", "installed"), [("cpu", True), ("cuda", False), ("", False)])
def test_only_the_cpu_platform_has_stubs(platform: str, installed: bool) -> None:
    code = (
        "import sys, recipe.async_pipeline.verl_bridge.rollout.sglang\n"
        "from recipe.async_pipeline.verl_bridge.rollout.sglang import cpu_stubs\n"
        "print(any(isinstance(finder, cpu_stubs._AtFirstImport) for finder in sys.meta_path),"
        " any(name in sys.modules for name in ('sglang', 'torch', 'torchvision', 'IPython')))"
    )
    done = run(code, VERL_PLATFORM=platform)
    assert done.stdout.split() == [str(installed), "False"], done.stderr[-2000:]


def test_of_the_kernels_only_those_for_cpus_have_names() -> None:
    """Newer releases import them; SGLang uses torch's functions where another name is missing."""
    code = (
        f"import {MODULE} as stubs\n"
        "stubs.sgl_kernel()\n"
        "from sgl_kernel import copy_all_layer_kv_cache_cpu\n"
        "from sgl_kernel.kvcacheio import transfer_kv_direct\n"
        "from sgl_kernel import merge_state_v2"
    )
    assert "cannot import name 'merge_state_v2'" in run(code, VERL_PLATFORM="").stderr


def test_a_length_and_its_positions_have_the_same_angles() -> None:
    code = (
        f"import torch, {MODULE} as stubs\n"
        "from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionRotaryEmbedding\n"
        "positions = torch.arange(5)\n"
        "angles = Qwen2_5_VisionRotaryEmbedding(8)(positions[:, None])\n"
        "stubs.angles_by_length()\n"
        "embedding = Qwen2_5_VisionRotaryEmbedding(8)\n"
        "assert embedding(positions[:, None]).equal(angles)\n"
        "assert embedding(5).equal(angles) and embedding(torch.tensor(5)).equal(angles)\n"
    )
    done = run(code, VERL_PLATFORM="")
    assert done.returncode == 0, done.stderr[-2000:]
