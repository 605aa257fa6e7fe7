# SPDX-License-Identifier: Apache-2.0
"""The plug-ins that the installed packages declare."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points


@cache
def plugins_of(group: str) -> frozenset[str]:
    """Return what the plug-ins of a group load, such as `package.module:function`."""
    return frozenset(point.value for point in entry_points(group=group))
