# SPDX-License-Identifier: Apache-2.0
"""Switch off what only observes a run when it fails, so that its error does not end the run.

    guarded call ──► raises ──► one line for the user, recorded for summary.json ──► never called again

The ledger and the checks of conservation and lag are not observers: their errors end the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from ..core.events import LogRecord
from ..errors import ConservationError, StalenessViolation
from ..redaction import without_secrets

P = ParamSpec("P")
T = TypeVar("T")
MESSAGE_CHARS = 300
"""Length to which the message of an error is cut."""

ACCOUNT, OVERLAP = "the account of device-seconds", "the overlap meter"
SELECTION, OFF_POLICY = "the selection meter", "the off-policy meter"
LOST: Mapping[str, str] = {
    ACCOUNT: "without device-seconds, bubble_ratio and overlap_efficiency",
    OVERLAP: "without overlap_s",
    SELECTION: "without bias/*",
    OFF_POLICY: "without off_policy/* and the lags of tokens",
}
"""What a run lacks without an observer."""


class Observers:
    """The observers of a run, by name. May be called from any thread."""

    def __init__(self, say: Callable[[str], None], *, strict: bool = False) -> None:
        """`say` receives one line for the user; with `strict` an observer's error is raised."""
        self._say, self._strict = say, strict
        self._off: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def off(self) -> Mapping[str, str]:
        """The error of each observer that was switched off."""
        with self._lock:
            return dict(self._off)

    def is_on(self, name: str) -> bool:
        """Return whether the observer has not failed."""
        return name not in self._off

    def guard(self, name: str, call: Callable[P, object], *, lost: str) -> Callable[P, None]:
        """Return `call` without a result and without errors; `lost` says what is missing once it is off."""

        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            self.value(name, call, *args, lost=lost, **kwargs)

        return guarded

    def subscriber(self, name: str, call: Callable[[LogRecord], object]) -> Callable[[LogRecord], object]:
        """Return a guarded subscriber of the event log."""
        return self.guard(name, call, lost=LOST.get(name, "without what it reports"))

    def value(
        self, name: str, call: Callable[..., T], *args: object, lost: str, **kwargs: object
    ) -> T | None:
        """Return what `call` returns, or None if the observer is off or fails now."""
        if not self.is_on(name):
            return None
        try:
            return call(*args, **kwargs)
        except (ConservationError, StalenessViolation):
            raise
        except Exception as error:  # noqa: BLE001 - observers include trackers and code of users
            if self._strict:
                raise
            self.failed(name, error, lost=lost)
            return None

    def failed(self, name: str, error: Exception, *, lost: str) -> None:
        """Switch an observer off and report it, once."""
        text = " ".join(without_secrets(f"{type(error).__name__}: {error}").split())[:MESSAGE_CHARS]
        with self._lock:
            if name in self._off:
                return
            self._off[name] = text
        self._say(f"{name} is switched off after an error: {text}; the run continues, {lost}")
