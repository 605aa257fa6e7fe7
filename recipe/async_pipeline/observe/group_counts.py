# SPDX-License-Identifier: Apache-2.0
"""Count the groups in each place of the pipeline from the event log, at every moment of a run.

DRAWN ──► answering ──► finished ──► batched ──► (trained)
              │             │
          RECALLED       REJECTED        both leave; a group that is generated again keeps its place
"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.events import LogRecord


class GroupCounts:
    """A subscriber of the event log that counts groups by place."""

    def __init__(self) -> None:
        self._answering: set[str] = set()
        self._finished: set[str] = set()
        self._batched: dict[int, int] = {}
        """Step to the number of groups in its batch."""

    def __call__(self, record: LogRecord) -> bool:
        """Process a record. Returns whether a group moved."""
        event, fields = record.event, record.fields
        if event == "DRAWN":
            self._answering |= set(fields["keys"])
        elif event == "OUTPUT" and record.role == "generate":
            return self._finish(str(fields.get("key")))
        elif event == "RECALLED" and fields.get("fate") == "drop":
            self._answering.discard(str(fields["key"]))
        elif event == "REJECTED":
            self._finished.discard(str(fields["key"]))
        elif event == "ASSEMBLED":
            self._finished -= set(fields["keys"])
            self._batched[int(fields["step"])] = len(fields["keys"])
        elif event == "TRAINED":
            self._batched.pop(int(fields["step"]), None)
        else:
            return False
        return True

    def _finish(self, key: str) -> bool:
        if key not in self._answering:
            return False
        self._answering.remove(key)
        self._finished.add(key)
        return True

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of groups by place, in the order in which a group passes through them."""
        return {
            "answering": len(self._answering),
            "finished": len(self._finished),
            "batched": sum(self._batched.values()),
        }
