# SPDX-License-Identifier: Apache-2.0
"""Run one arm of `async-pipeline bench weight-sync`: verl's entry point with a runner that only publishes."""

from __future__ import annotations

import ray
from verl.trainer import main_ppo

from .weight_sync import SyncTaskRunner


def main() -> None:
    """Run with the command line of `verl.trainer.main_ppo`."""
    main_ppo.TaskRunnerV1 = ray.remote(SyncTaskRunner)
    main_ppo.main()


if __name__ == "__main__":
    main()
