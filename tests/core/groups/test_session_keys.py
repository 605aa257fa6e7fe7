# SPDX-License-Identifier: Apache-2.0
"""The episode of a response, and the last response of each episode, are found by their keys."""

from __future__ import annotations

from recipe.async_pipeline.core.groups.session_keys import episode_of, last_keys


def test_the_last_key_of_each_session() -> None:
    keys = ["u_0_0", "u_0_1", "u_0_2", "u_1_0", "u_10_0", "u_2_9", "u_2_10", "v_0_0", "a", "a_b"]
    assert last_keys(keys) == {"u_0_2", "u_1_0", "u_10_0", "u_2_10", "v_0_0", "a", "a_b"}
    assert last_keys([]) == set()


def test_the_keys_of_an_episode_have_its_name() -> None:
    keys = ["u_0_0", "u_0_10", "u_10_0", "v_w_1_0", "a", "a_b"]
    assert [episode_of(key) for key in keys] == ["u_0", "u_0", "u_10", "v_w_1", "a", "a_b"]
