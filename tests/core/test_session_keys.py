# SPDX-License-Identifier: Apache-2.0
"""The last response of each episode is found by its key."""

from __future__ import annotations

from recipe.async_pipeline.core.session_keys import last_keys


def test_the_last_key_of_each_session() -> None:
    keys = ["u_0_0", "u_0_1", "u_0_2", "u_1_0", "u_10_0", "u_2_9", "u_2_10", "v_0_0", "a", "a_b"]
    assert last_keys(keys) == {"u_0_2", "u_1_0", "u_10_0", "u_2_10", "v_0_0", "a", "a_b"}
    assert last_keys([]) == set()
