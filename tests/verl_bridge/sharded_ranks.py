# SPDX-License-Identifier: Apache-2.0
"""Run the ranks of `sharded_gather.py` and `sharded_adapters.py`, each number of ranks in turn.

Argument: a folder. Prints what each rank printed, as JSON: by cell, such as gather@4, then by rank.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from tests.fakes.forked_ranks import fork_ranks
from tests.verl_bridge import sharded_adapters, sharded_gather

CELLS = {
    "gather@1": (sharded_gather.run_rank, 1),
    "gather@2": (sharded_gather.run_rank, 2),
    "gather@4": (sharded_gather.run_rank, 4),
    "adapters@1": (sharded_adapters.run_rank, 1),
    "adapters@2": (sharded_adapters.run_rank, 2),
}

if __name__ == "__main__":
    printed = {
        name: fork_ranks(partial(run, count=count, file=str(Path(sys.argv[1], name))), range(count))
        for name, (run, count) in CELLS.items()
    }
    sys.stdout.write(json.dumps(printed))
