# SPDX-License-Identifier: Apache-2.0
"""Policy versions, and how old a sample may be.

Version 0 is the starting weights; the optimizer step `s` starts at version s-1 and makes version s. A
version is *trained* once its step ended, *gathered* once its full weights are in host memory, and
*served* once every replica serves it and has proved it.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from ..errors import ChannelClosed, StageProtocolError, StalenessViolation

Kind = Literal["trained", "gathered", "served"]


def lag(trainer_version: int, first_version: int) -> int:
    """How many versions older a sample's first span is than the trainer when it starts to use the sample."""
    return trainer_version - first_version


def check_lag(step: int, first_version: int, max_lag: int, what: str) -> int:
    """The lag of `what` in the optimizer step `step`, which starts at version step-1.

    Raises StalenessViolation: it is older than `max_lag`, or claims a version not trained by then.
    """
    trainer_version = step - 1
    found = lag(trainer_version, first_version)
    if found < 0:
        raise StalenessViolation(
            f"step {step} starts at version {trainer_version}, but {what} claims version {first_version}, "
            "which does not exist yet"
        )
    if found > max_lag:
        raise StalenessViolation(
            f"step {step} got {what} of version {first_version}: lag {found} exceeds max_lag {max_lag}"
        )
    return found


class Versions:
    """The newest version that was trained, gathered and served: served <= gathered <= trained, always.

    Nothing is gathered or served (-1) until version 0 was published. Each counter only grows; it may
    skip versions, and advancing it to where it stands does nothing.
    """

    def __init__(self) -> None:
        self._reached: dict[Kind, int] = {"trained": 0, "gathered": -1, "served": -1}
        self._waiters: list[tuple[Kind, int, asyncio.Future[None]]] = []

    @property
    def trained(self) -> int:
        return self._reached["trained"]

    @property
    def gathered(self) -> int:
        return self._reached["gathered"]

    @property
    def served(self) -> int:
        """The newest version that *every* replica serves."""
        return self._reached["served"]

    def advance_trained(self, version: int) -> None:
        """The step that made `version` ended. Raises StalenessViolation: a newer one was trained before."""
        self._advance("trained", version)

    def advance_gathered(self, version: int) -> None:
        """The full weights of `version` are in host memory.

        Raises StalenessViolation: a newer one was gathered before, or `version` is not trained yet.
        """
        if version > self.trained:
            raise StalenessViolation(f"version {version} cannot be gathered: only {self.trained} is trained")
        self._advance("gathered", version)

    def advance_served(self, version: int) -> None:
        """Every replica serves `version`.

        Raises StalenessViolation: a newer one was served before, or `version` is not gathered yet.
        """
        if version > self.gathered:
            raise StalenessViolation(f"version {version} cannot be served: only {self.gathered} is gathered")
        self._advance("served", version)

    async def wait_for(self, kind: Kind, version: int) -> None:
        """Return once `kind` has reached `version`; at once if it has.

        Waits for: the counter. Unblocked by: `advance_*`. Safe to cancel.
        """
        if self._reached[kind] >= version:
            return
        waiter = (kind, version, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter[2]
        finally:
            self._waiters.remove(waiter)

    def _advance(self, kind: Kind, version: int) -> None:
        if version < self._reached[kind]:
            raise StalenessViolation(f"{kind} version cannot go back from {self._reached[kind]} to {version}")
        self._reached[kind] = version
        for waited, wanted, future in self._waiters:
            if waited == kind and wanted <= version and not future.done():
                future.set_result(None)


class BatchAdmission:
    """Lets the prompts of a step go to the replicas when their answers cannot become too old.

    Why it bounds the lag of every token of a batch: step `step` starts at trainer version step-1.
    Its prompts go out only when every replica serves version step-1-max_lag or newer, and a replica
    never goes back, so each token is of version >= step-1-max_lag, however long its answer takes:
    lag <= (step-1) - (step-1-max_lag) = max_lag. It presupposes that a batch is used in the step that
    it was admitted for; a trainer that picks samples in another order must check each of them.
    """

    def __init__(
        self, versions: Versions, max_lag: int, first_step: int = 1, last_step: int | None = None
    ) -> None:
        if max_lag < 0:
            raise ValueError(f"max_lag must be >= 0, got {max_lag}")
        if first_step < 1:
            raise ValueError(f"first_step must be >= 1, got {first_step}")
        self._versions = versions
        self._max_lag = max_lag
        self._next_step = first_step
        self._last_step = last_step
        self._waiting = False

    def admits(self, step: int) -> bool:
        """May the prompts of `step` go out now?"""
        return self._versions.served >= self._needed_version(step)

    async def next_step(self) -> int:
        """The steps in order, each as soon as it is admitted; a call that is cancelled skips none.

        Waits for: a served version. Unblocked by: `Versions.advance_served`.
        Raises ChannelClosed: the last step was admitted before. StageProtocolError: somebody waits already.
        """
        step = self._next_step
        if self._last_step is not None and step > self._last_step:
            raise ChannelClosed(f"admission: step {self._last_step} was the last")
        if self._waiting:
            raise StageProtocolError(f"admission: somebody waits for step {step} already; only one may")
        self._waiting = True
        try:
            await self._versions.wait_for("served", self._needed_version(step))
        finally:
            self._waiting = False
        self._next_step = step + 1
        return step

    def _needed_version(self, step: int) -> int:
        # Not below 0: whatever lag is allowed, nothing is generated before the starting weights are served.
        return max(0, step - 1 - self._max_lag)
