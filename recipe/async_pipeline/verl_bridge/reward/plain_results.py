# SPDX-License-Identifier: Apache-2.0
"""What reward functions return, for processes that lack the modules of their files.

Imports neither verl nor torch, because the processes of a reward function's pool import it.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from typing import Any

from ...core.groups.scores import Score

logger = logging.getLogger(__name__)
EVERYWHERE = sys.stdlib_module_names | {"numpy", "torch", "PIL"}
"""Packages whose objects each process of a run can read."""

_told: set[str] = set()


def plain_result(result: Any) -> Any:
    """Return a result, or a list of them, with texts in place of objects of other modules than these.

    A score of such a type becomes its number. The log names each value that is changed once in a process.
    """
    if isinstance(result, Mapping):
        return {
            name: _score(value) if name == "score" else _plain(value, str(name))
            for name, value in result.items()
        }
    if isinstance(result, list | tuple):
        return [plain_result(one) for one in result]
    return _score(result)


def _score(value: Any) -> Any:
    if _is_readable(value):
        return value
    number = Score.of(value).value
    return str(value) if number is None else number


def _plain(value: Any, name: str) -> Any:
    if _is_readable(value):
        return value
    from ...checkpoint.tensor_tree import storable

    def tell(keys: str, kind: type) -> None:
        keys = f"{name}.{keys}" if keys else name
        if keys not in _told:
            _told.add(keys)
            logger.warning(
                "the reward function's %s is a %s.%s, which other processes cannot read: its text is stored; "
                "return numbers, text, lists or dicts",
                keys,
                kind.__module__,
                kind.__qualname__,
            )

    return storable(value, tell)


def _is_readable(value: Any) -> bool:
    if isinstance(value, type) or callable(value):
        return False  # pickled as names of their modules
    kind = type(value)
    if kind is str:
        return not re.search("[\ud800-\udfff]", value)  # which no file of text can hold
    if kind.__module__.partition(".")[0] not in EVERYWHERE:
        return False
    if isinstance(value, Mapping):
        return all(_is_readable(one) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_readable, value))
    return getattr(getattr(value, "dtype", None), "kind", "") != "O" or all(map(_is_readable, value.flat))
