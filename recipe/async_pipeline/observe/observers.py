# SPDX-License-Identifier: Apache-2.0
"""Switch off what only observes a run when it fails, so that its error does not end the run.

    guarded call ──► raises ──► one line for the user, recorded for summary.json ──► never called again
                                └── for what can miss a call: called again later, `attempts` times in a row

The ledger and the checks of conservation and lag are not observers: their errors end the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from ..core.events import LogRecord
from ..core.groups.bad_data import is_round
from ..core.waits.retry import Retry
from ..errors import ConservationError, StalenessViolation
from ..redaction import without_secrets

P = ParamSpec("P")
T = TypeVar("T")
MESSAGE_CHARS = 300
"""Length to which the message of an error is cut."""
FILE_ATTEMPTS = 8
"""Failures in a row of something that writes a file now and then."""
RETRY_S, LONGEST_RETRY_S = 5.0, 300.0
"""Seconds until an observer is called again after an error, at first and at most."""

ACCOUNT, OVERLAP = "the account of device-seconds", "the overlap meter"
SELECTION, OFF_POLICY = "the selection meter", "the off-policy meter"
LOST: Mapping[str, str] = {
    ACCOUNT: "without device-seconds, bubble_ratio and overlap_efficiency",
    OVERLAP: "without overlap_s",
    SELECTION: "without bias/*",
    OFF_POLICY: "without off_policy/* and the lags of tokens",
}
"""What a run lacks without an observer."""


def short_text(error: BaseException) -> str:
    """Return type and message of an error on one line, without secrets."""
    return " ".join(without_secrets(f"{type(error).__name__}: {error}").split())[:MESSAGE_CHARS]


class Observers:
    """The observers of a run, by name. May be called from any thread."""

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        strict: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`say` receives one line for the user; with `strict` an observer's error is raised."""
        self._now = now
        self.say, self.strict = say, strict
        self._retries: dict[str, Retry] = {}
        self._off: dict[str, str] = {}
        self._failing: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def off(self) -> Mapping[str, str]:
        """The error of each observer that was switched off."""
        with self._lock:
            return dict(self._off)

    @property
    def failing(self) -> Mapping[str, str]:
        """The error of each observer whose last call failed and which is still on."""
        with self._lock:
            return dict(self._failing)

    def is_on(self, name: str) -> bool:
        """Return whether the observer has not failed."""
        return name not in self._off

    def guard(
        self, name: str, call: Callable[P, object], *, lost: str, attempts: int = 1
    ) -> Callable[P, None]:
        """Return `call` without a result and without errors; `lost` says what is missing once it is off.

        It is switched off after `attempts` failures in a row. After each of them, calls are left out for a
        while. For code that does not need to see every call, such as the writer of a file for each step.
        """

        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            self.value(name, call, *args, lost=lost, attempts=attempts, **kwargs)

        return guarded

    def subscriber(self, name: str, call: Callable[[LogRecord], object]) -> Callable[[LogRecord], object]:
        """Return a guarded subscriber of the event log."""
        return self.guard(name, call, lost=LOST.get(name, "without what it reports"))

    def value(
        self,
        name: str,
        call: Callable[..., T],
        *args: object,
        lost: str,
        attempts: int = 1,
        **kwargs: object,
    ) -> T | None:
        """Return what `call` returns, or None if the observer is off, waits or fails now; see `guard`."""
        failed = self._retries.get(name)
        if not self.is_on(name) or (failed is not None and not failed.is_due(self._now())):
            return None
        try:
            result = call(*args, **kwargs)
            if failed is not None:
                failed.succeeded()
                with self._lock:
                    self._failing.pop(name, None)
            return result
        except (ConservationError, StalenessViolation):
            raise
        except Exception as error:  # noqa: BLE001 - observers include trackers and code of users
            if self.strict:
                raise
            with self._lock:
                made = Retry(limit=attempts, first=RETRY_S, longest=LONGEST_RETRY_S)
                retry = self._retries.setdefault(name, made)
                again = retry.failed(self._now())
                self._failing[name] = short_text(error)
            if not again:
                self.failed(name, error, lost=lost)
            elif is_round(retry.total):
                self.say(
                    f"{name} failed: {short_text(error)}; it is tried again, and switched off after "
                    f"{attempts} failures in a row"
                )
            return None

    def failed(self, name: str, error: Exception, *, lost: str) -> None:
        """Switch an observer off and report it, once."""
        text = short_text(error)
        with self._lock:
            if name in self._off:
                return
            self._off[name] = text
            self._failing.pop(name, None)
        self.say(f"{name} is switched off after an error: {text}; the run continues, {lost}")
