# SPDX-License-Identifier: Apache-2.0
"""Run one arm of a benchmark once: verl's entry point with a task runner that times the trainer."""

from __future__ import annotations

import ray
from verl.trainer import main_ppo

from .probe import ProbedTaskRunner


def main() -> None:
    """Run with the command line of `verl.trainer.main_ppo`."""
    main_ppo.TaskRunnerV1 = ray.remote(ProbedTaskRunner)
    main_ppo.main()


if __name__ == "__main__":
    main()
