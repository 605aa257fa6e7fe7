# SPDX-License-Identifier: Apache-2.0
"""The sessions of a process, and which of their keys opens what."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple

from ..errors import RequestRefused
from .sessions import DONE, Session, ended

ENDED_KEYS = 4096
"""Keys of ended sessions that are remembered, so that a late request is refused with the reason."""


class Access(NamedTuple):
    """What a key opens."""

    session: Session
    controls: bool
    """It is the control key."""


class Sessions:
    """All sessions of a process, by their keys."""

    def __init__(self) -> None:
        self._access: dict[bytes, Access] = {}
        self._ended: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._access) // 2

    def add(self, session: Session) -> None:
        """Let its keys in."""
        self._access[_digest(session.keys.model)] = Access(session, False)
        self._access[_digest(session.keys.control)] = Access(session, True)

    def remove(self, session: Session) -> None:
        """Refuse its keys. Ignores a session that is not there."""
        for key in (session.keys.model, session.keys.control):
            digest = _digest(key)
            if self._access.pop(digest, None) is not None:
                self._ended[digest] = session.ended or DONE
        while len(self._ended) > ENDED_KEYS:
            self._ended.popitem(last=False)

    def of(self, key: str, *, controls: bool) -> Session:
        """Return the session of a key.

        Raises RequestRefused if there is no such key, if its session has ended, or if it is the other one.
        """
        # The digest, not the key, is compared: the time that it takes tells nothing about the key.
        digest = _digest(key)
        access = self._access.get(digest)
        if access is None:
            if digest in self._ended:
                raise ended(self._ended[digest])
            raise RequestRefused("unknown key", status=401)
        if access.controls is not controls:
            needed = "control" if controls else "model"
            raise RequestRefused(f"this needs the {needed} key of the session", status=403)
        return access.session


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
