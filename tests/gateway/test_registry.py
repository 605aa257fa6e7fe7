# SPDX-License-Identifier: Apache-2.0
"""The two keys of a session open different things, and nothing once it has ended."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.errors import RequestRefused
from recipe.async_pipeline.gateway.registry import ENDED_KEYS, Sessions
from recipe.async_pipeline.gateway.sessions import Session
from tests.fakes.agent_policy import LIMITS, FakePolicy


async def test_keys() -> None:
    sessions = Sessions()
    one, two = Session(FakePolicy(), LIMITS), Session(FakePolicy(), LIMITS)
    for session in (one, two):
        sessions.add(session)
        assert session.keys.model not in repr(session.keys)
    assert len(sessions) == 2
    assert sessions.of(one.keys.model, controls=False) is one
    assert sessions.of(two.keys.control, controls=True) is two
    for key, controls, status in (
        (one.keys.model, True, 403),
        (one.keys.control, False, 403),
        ("", False, 401),
        ("sk-\udcff", False, 401),
    ):
        with pytest.raises(RequestRefused) as refused:
            sessions.of(key, controls=controls)
        assert refused.value.status == status
    one.end("recalled")
    sessions.remove(one)
    sessions.remove(one)
    with pytest.raises(RequestRefused, match="has ended: recalled") as refused:
        sessions.of(one.keys.model, controls=False)
    assert refused.value.status == 410 and len(sessions) == 1


async def test_keys_of_ended_sessions_are_forgotten_at_last() -> None:
    sessions = Sessions()
    first = Session(FakePolicy(), LIMITS)
    sessions.add(first)
    sessions.remove(first)
    for _ in range(ENDED_KEYS // 2):
        session = Session(FakePolicy(), LIMITS)
        sessions.add(session)
        sessions.remove(session)
    with pytest.raises(RequestRefused) as refused:
        sessions.of(first.keys.model, controls=False)
    assert refused.value.status == 401
