# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that talk to a gateway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes.served_gateway import served

Serve = Callable[..., Any]


@pytest.fixture
def serve() -> Serve:
    """Return a context that serves a policy's session."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    return served
