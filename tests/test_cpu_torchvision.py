# SPDX-License-Identifier: Apache-2.0
"""torchvision's image processing works next to torch's CPU build, in any process of the environment."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A process as a user's own script is one: it knows nothing of this package.
PROCESS = [sys.executable, "-I", "-c"]
pytestmark = pytest.mark.real_engine


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROCESS, code], capture_output=True, text=True)


def test_pictures_are_resized_and_normalized() -> None:
    done = run(
        "import torch\n"
        "from torchvision.transforms.v2 import functional as transforms\n"
        "half = torch.full((3, 8, 8), 128, dtype=torch.uint8)\n"
        "small = transforms.resize(half, [4, 4], antialias=True)\n"
        "scaled = transforms.normalize(small.float() / 255, [0.5] * 3, [0.5] * 3)\n"
        "print(tuple(small.shape), round(scaled.max().item(), 4))\n"
    )
    assert done.stdout.strip() == "(3, 4, 4) 0.0039", done.stderr[-2000:]


def test_without_the_declarations_torchvision_is_not_imported() -> None:
    """If this fails, torchvision no longer needs them: delete run_scripts/cpu_torchvision.py."""
    found = run(
        "import sys\n"
        "sys.meta_path[:] = [one for one in sys.meta_path if type(one).__module__ != 'cpu_torchvision']\n"
        "import torchvision\n"
    )
    assert "torchvision::nms does not exist" in found.stderr


def test_to_look_for_torchvision_imports_nothing() -> None:
    done = run(
        "import importlib.util, sys\n"
        "print(importlib.util.find_spec('torchvision') is not None, 'torch' in sys.modules)\n"
    )
    assert done.stdout.split() == ["True", "False"], done.stderr[-2000:]
