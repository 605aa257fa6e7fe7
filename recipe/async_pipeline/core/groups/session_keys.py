# SPDX-License-Identifier: Apache-2.0
"""Keys of responses, `uid_session_index`: an episode has one for each conversation; the last is scored."""

from __future__ import annotations

from collections.abc import Iterable


def last_keys(keys: Iterable[str]) -> set[str]:
    """Return the key of the last response of each episode."""
    found = set(keys)
    return {key for key in found if _following(key) not in found}


def episode_of(key: str) -> str:
    """Return what the keys of an episode have in common; a key of another form is an episode by itself."""
    episode, _, index = key.rpartition("_")
    return episode if index.isdecimal() else key


def _following(key: str) -> str:
    """Return the key of the next response of the same episode, or an empty text for other keys."""
    episode, _, index = key.rpartition("_")
    return f"{episode}_{int(index) + 1}" if index.isdecimal() else ""
