# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO of images with the defaults of `configs/diffusion.yaml`, which has the keys of other systems:

python -m recipe.async_pipeline.verl_bridge.main_flowgrpo <hydra overrides>
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
_CHOICES = ("--config-path", "--config-dir", "--config-name", "-cp", "-cd", "-cn")


def arguments_of(given: Sequence[str]) -> list[str]:
    """Return the arguments of verl's entry point, with our config file unless another one is named."""
    if any(one.partition("=")[0] in _CHOICES for one in given):
        return list(given)
    return ["--config-path", str(CONFIGS), "--config-name", "diffusion", *given]


def main() -> None:
    """Run verl's entry point."""
    from verl.trainer import main_ppo

    from . import hooks

    sys.argv[1:] = arguments_of(sys.argv[1:])
    hooks.rewrite_command_line(sys.argv, switched_on=True)
    main_ppo.main()


if __name__ == "__main__":
    main()
