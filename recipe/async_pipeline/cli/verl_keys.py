# SPDX-License-Identifier: Apache-2.0
"""The keys of verl's configuration, read from its files, for commands that do not import verl."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from ..config.misplaced import ALIKE
from ..config.paths import OWN, select
from ..contract.config_keys import keys_of_tree
from ..errors import PatchError
from ..patching.verl_source import find_verl_root


def near_key(path: str) -> str | None:
    """Return the name in verl's section that the last part of a path resembles, or None."""
    if path.startswith(f"{OWN}."):
        return None
    try:
        trees = keys_of_tree(find_verl_root()).values()
    except PatchError:
        return None
    parent, _, name = path.rpartition(".")
    sections = [select(tree, parent) if parent else tree for tree in trees]
    known = {str(key) for section in sections if isinstance(section, Mapping) for key in section}
    return next(iter(difflib.get_close_matches(name, sorted(known), 1, ALIKE)), None)
