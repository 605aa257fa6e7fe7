# SPDX-License-Identifier: Apache-2.0
"""A neighbour of a user's reward function."""

from __future__ import annotations

POINTS = {"neighbour": 7.0}
