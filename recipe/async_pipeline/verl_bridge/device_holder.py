# SPDX-License-Identifier: Apache-2.0
"""Holds the devices of a rollout replica, so that Ray gives them to nobody else.

verl uses a weight-receiving worker for that, which imports the whole rollout stack; ours receives
weights in the engine itself, so an empty actor does and starts sooner.
"""

from __future__ import annotations

from typing import Any


class DeviceHolder:
    """Takes and ignores whatever verl passes; answers verl's question for node and device ids."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass
