# SPDX-License-Identifier: Apache-2.0
"""A strategy of your own: how far generation may run ahead is decided in one class.

python examples/my_strategy.py                      here, in virtual time, with Python alone
... +async_strategy=examples.my_strategy:Cautious   in a run, from the folder of the checkout
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipe.async_pipeline.strategies import NStepAhead, OnPolicy


class Cautious(NStepAhead):
    """Generate one batch ahead at first, and one more after every third step, up to `max_lag`."""

    def queue(self, versions):
        queue = super().queue(versions)

        def grow():
            queue.depth = min(self.max_lag, 1 + versions.served // 3)

        grow()
        versions.subscribe(grow)
        return queue


if __name__ == "__main__":
    from hello_pipeline import BATCH, STEPS, run, show

    _, _, on_policy_s = run(OnPolicy(batch=BATCH, last_step=STEPS))
    for strategy in (NStepAhead, Cautious):
        show(strategy.__name__, *run(strategy(batch=BATCH, last_step=STEPS, max_lag=3)), on_policy_s)
