# SPDX-License-Identifier: Apache-2.0
"""verl's entry point with a task runner that only publishes: one arm of `async-pipeline bench
weight-sync`.
"""

from __future__ import annotations

import ray
from verl.trainer import main_ppo

from .weight_sync import SyncTaskRunner


def main() -> None:
    """Takes the same command line as `verl.trainer.main_ppo`."""
    main_ppo.TaskRunnerV1 = ray.remote(SyncTaskRunner)
    main_ppo.main()


if __name__ == "__main__":
    main()
