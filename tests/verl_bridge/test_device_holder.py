# SPDX-License-Identifier: Apache-2.0
"""The actor that only holds devices: accepts what verl passes and costs no import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from recipe.async_pipeline.verl_bridge.device_holder import DeviceHolder


def test_it_takes_whatever_verl_passes() -> None:
    assert isinstance(DeviceHolder(), DeviceHolder)
    assert isinstance(DeviceHolder({"config": 1}, device_mesh=None, rank=3), DeviceHolder)


def test_it_loads_nothing_of_the_stack() -> None:
    code = (
        "import sys, recipe.async_pipeline.verl_bridge.device_holder; "
        "sys.stdout.write(' '.join({'torch', 'verl', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=root)
    assert done.stdout == ""
