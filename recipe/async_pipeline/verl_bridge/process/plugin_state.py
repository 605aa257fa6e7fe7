# SPDX-License-Identifier: Apache-2.0
"""Whether verl has loaded this package's plugin.

verl swallows the error of a plugin that fails to load, so `plugin` records that it ran.
"""

from __future__ import annotations

from ...errors import PatchedVerlRequired

_loaded = False


def set_loaded() -> None:
    """Record that verl loaded the plugin in this process."""
    global _loaded
    _loaded = True


def require_loaded() -> None:
    """Raises PatchedVerlRequired if verl has not loaded the plugin in this process."""
    if not _loaded:
        raise PatchedVerlRequired("verl did not load our plugin; run `pip install -e .` here, then retry")
