# SPDX-License-Identifier: Apache-2.0
"""Act on a module of verl when it is imported, without importing it earlier.

verl's registries are in modules that take seconds to import, and the plugin runs in every process that
imports verl.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from ...errors import PatchedVerlRequired

ImportAction = Callable[[ModuleType], None]


class LateActions(MetaPathFinder):
    """Finds what the other finders find, with a loader that calls the actions once the module is complete."""

    def __init__(self) -> None:
        self.actions: dict[str, list[ImportAction]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for other in others if (found := other.find_spec(name, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            load(module)
            for action in self.actions[name]:
                action(module)

        # The loader belongs to this spec alone, and stays an instance of its class for other users of it.
        vars(spec.loader)["exec_module"] = load_and_act
        return spec


_FINDER = LateActions()


def after_import(name: str, action: ImportAction) -> None:
    """Call `action` with the module `name` when its import ends, or at once if it has been imported.

    Importers that take names from the module get what `action` leaves there. Idempotent.
    """
    actions = _FINDER.actions.setdefault(name, [])
    if action in actions:
        return
    actions.append(action)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    if name in sys.modules:
        action(sys.modules[name])


_loaded = False


def set_loaded() -> None:
    """Record that verl loaded the plugin in this process.

    verl swallows the error of a plugin that fails to load, so `plugin` records that it ran.
    """
    global _loaded
    _loaded = True


def require_loaded() -> None:
    """Raises PatchedVerlRequired if verl has not loaded the plugin in this process."""
    if not _loaded:
        raise PatchedVerlRequired("verl did not load our plugin; run `pip install -e .` here, then retry")
