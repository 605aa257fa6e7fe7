# SPDX-License-Identifier: Apache-2.0
"""Run the job of `bench control-plane` or `bench checkpoint`: verl's entry point with an idle trainer."""

from __future__ import annotations

import json
import os

import ray
from verl.trainer import main_ppo

from ..control_plane import ENGINE
from .checkpoint import CheckpointTaskRunner
from .control_plane import IdleTaskRunner


def main() -> None:
    """Run with the command line of `verl.trainer.main_ppo`."""
    saves = "tokens" in json.loads(os.environ[ENGINE])
    main_ppo.TaskRunnerV1 = ray.remote(CheckpointTaskRunner if saves else IdleTaskRunner)
    main_ppo.main()


if __name__ == "__main__":
    main()
