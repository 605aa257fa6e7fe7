# SPDX-License-Identifier: Apache-2.0
"""Run the job of `async-pipeline bench control-plane`: verl's entry point with an idle trainer."""

from __future__ import annotations

import ray
from verl.trainer import main_ppo

from .control_plane import IdleTaskRunner


def main() -> None:
    """Run with the command line of `verl.trainer.main_ppo`."""
    main_ppo.TaskRunnerV1 = ray.remote(IdleTaskRunner)
    main_ppo.main()


if __name__ == "__main__":
    main()
