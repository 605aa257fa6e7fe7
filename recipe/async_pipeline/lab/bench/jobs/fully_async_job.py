# SPDX-License-Identifier: Apache-2.0
"""Run the entry point of verl's `experimental/fully_async_policy` with the probed trainer."""

from __future__ import annotations

import ray
from verl.experimental.fully_async_policy import fully_async_main as stock

from .fully_async import ProbedFullyAsyncRunner


def main() -> None:
    """Run with the command line of `fully_async_main`."""
    stock.FullyAsyncTaskRunner = ray.remote(num_cpus=1)(ProbedFullyAsyncRunner)
    stock.main()


if __name__ == "__main__":
    main()
