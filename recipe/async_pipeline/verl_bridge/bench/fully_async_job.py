# SPDX-License-Identifier: Apache-2.0
"""The entry point of verl's `experimental/fully_async_policy`, with a trainer that is timed."""

from __future__ import annotations

import ray
from verl.experimental.fully_async_policy import fully_async_main as stock

from .fully_async import ProbedFullyAsyncRunner


def main() -> None:
    """Takes the same command line as `fully_async_main`."""
    stock.FullyAsyncTaskRunner = ray.remote(num_cpus=1)(ProbedFullyAsyncRunner)
    stock.main()


if __name__ == "__main__":
    main()
