# SPDX-License-Identifier: Apache-2.0
"""The replica with the fewest open requests is found after any sequence of changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.tools.plan.simulated.least_busy import LeastBusy
from recipe.async_pipeline.tools.plan.simulated.replica import Replica


@given(st.lists(st.integers(0, 3), max_size=60))
def test_pick_returns_a_least_busy_replica(choices: list[int]) -> None:
    replicas = [Replica(i, (0.0, 1.0)) for i in range(4)]
    least_busy = LeastBusy(replicas)
    for choice in choices:
        replica = replicas[choice]
        if replica.open and choice % 2:
            least_busy.one_less(replica)
        else:
            least_busy.one_more(replica)
        found = least_busy.pick()
        assert found is not None
        assert found.open == min(r.open for r in replicas)
    for replica in replicas:
        least_busy.remove(replica)
    assert least_busy.pick() is None
