# SPDX-License-Identifier: Apache-2.0
"""Entry point of `python -m recipe.async_pipeline`, equivalent to the command `async-pipeline`."""

from __future__ import annotations

import sys

from recipe.async_pipeline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
