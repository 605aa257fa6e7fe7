# SPDX-License-Identifier: Apache-2.0
"""Random settings of a `SimTrainer`, for tests of what holds in every run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.fakes.trainer import ALL_ROLES, LAYOUTS, WITH_CRITIC

ANSWER_TIMES = st.lists(st.sampled_from([0.0, 0.1, 1.0, 7.0, 40.0]), min_size=1, max_size=12)
"""Seconds that responses take, one after the other and then again."""


@st.composite
def random_runs(draw: st.DrawFn, *costs: str, min_steps: int = 1) -> dict[str, Any]:
    """Draw settings with which a run reaches its end; `costs` names the calls that take random times."""
    max_lag = draw(st.integers(0, 4))
    groups = draw(st.integers(1, 4))
    straggler = draw(st.sampled_from(["wait", "regenerate", "drop", "mask"]))
    share = draw(st.sampled_from([0.5, 1.0])) if max_lag and groups > 1 and straggler != "mask" else 1.0
    places = draw(st.sampled_from(LAYOUTS))
    old = draw(st.sampled_from(["trainer", "logp_pool", "rollout"]))
    if "logp" not in places or (old == "logp_pool" and max_lag == 0):
        old = "trainer"

    # With fewer publications than this, no sample would be new enough.
    sync_every = min(draw(st.integers(1, 5)), max_lag + (share == 1))
    # A pool that computes under the trainer's own weights needs every version of them.
    sync_every = 1 if "logp" in places and old == "trainer" else sync_every

    return {
        "max_lag": max_lag,
        "steps": draw(st.integers(min_steps, 8)),
        "groups": groups,
        "costs": {name: draw(st.sampled_from([0.0, 0.5, 6.0])) for name in costs},
        "order": draw(st.sampled_from(["drawn", "finished"])),
        "straggler": straggler,
        "oldest_share": share,
        "sync_every": sync_every,
        "places": places,
        "old": old,
        "roles": (
            *draw(st.sampled_from([ALL_ROLES, WITH_CRITIC])),
            *draw(st.sampled_from([(), ("teacher",)])),
        ),
        "filtered": one_in(draw(st.sampled_from([2, 3, None]))),
    }


def one_in(count: int | None) -> Callable[[str], bool]:
    """Return a function that is true for one uid in `count`, always the same ones; None: for none."""
    return lambda uid: count is not None and sum(uid.encode()) % count == 0
