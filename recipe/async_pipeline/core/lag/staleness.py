# SPDX-License-Identifier: Apache-2.0
"""Policy versions, how old a sample may be, and how far ahead generation may run.

Version 0 is the starting weights; the optimizer step `s` starts at version s-1 and makes version s. A
version is *trained* once its step ended, *gathered* once its full weights are in host memory, and
*served* once every replica of the rotation serves and has verified it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Literal

from ...errors import StalenessViolation, VersionNotServed

VersionKind = Literal["trained", "saved", "gathered", "served", "critic"]
MADE_BY: Mapping[VersionKind, str] = {
    "trained": "train",
    "saved": "train",
    "gathered": "param_update",
    "served": "param_update",
    "critic": "critic",
}
"""The stage that makes each of them."""


def lag(trainer_version: int, first_version: int) -> int:
    """Return how many versions older a sample's first span is than the trainer when the step starts."""
    return trainer_version - first_version


def check_lag(step: int, first_version: int, max_lag: int, what: str) -> int:
    """Return the lag of `what` in the optimizer step `step`, which starts at version step-1.

    Raises StalenessViolation if it is older than `max_lag`, or claims a version that is not trained by
    then.
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


def check_served(served: int | None, admitted: int | None, replica: str) -> None:
    """Check that a replica may generate for a group that was admitted with version `admitted`, if with any.

    Raises VersionNotServed if the replica serves an older version.
    """
    if admitted is not None and (served is None or served < admitted):
        raise VersionNotServed(
            f"{replica} serves version {served}, and the request requires version {admitted}; try another one"
        )


class Versions:
    """The newest version that was trained, gathered and served: served <= gathered <= trained, always.

    In addition, the step that the critic has learned from, whose versions are never published, and the step
    whose checkpoint, if it gets one, is complete.

    Nothing is gathered or served (-1) until version 0 was published. Each counter only grows; it may
    skip versions, and advancing it to where it stands does nothing.
    """

    def __init__(self) -> None:
        self._reached: dict[VersionKind, int] = {
            "trained": 0,
            "saved": 0,
            "gathered": -1,
            "served": -1,
            "critic": 0,
        }
        self._waiters: list[tuple[VersionKind, int, asyncio.Future[None]]] = []
        self._served_more: list[Callable[[], object]] = []

    @property
    def trained(self) -> int:
        return self._reached["trained"]

    @property
    def gathered(self) -> int:
        return self._reached["gathered"]

    @property
    def criticised(self) -> int:
        """The newest step that the critic has learned from."""
        return self._reached["critic"]

    @property
    def served(self) -> int:
        """The newest version that *every* replica of the rotation serves."""
        return self._reached["served"]

    def advance_trained(self, version: int) -> None:
        """Note that step `version` ended. Raises StalenessViolation if a newer one was trained before."""
        self._advance("trained", version)

    def advance_critic(self, version: int) -> None:
        """Note that the critic learned from step `version`. Raises StalenessViolation after a later one."""
        self._advance("critic", version)

    def advance_saved(self, step: int) -> None:
        """Note that no checkpoint of `step` is pending. Raises StalenessViolation if a later was saved."""
        self._advance("saved", step)

    def advance_gathered(self, version: int) -> None:
        """Note that the full weights of `version` are in host memory.

        Raises StalenessViolation if a newer one was gathered before, or `version` is not trained yet.
        """
        if version > self.trained:
            raise StalenessViolation(f"version {version} cannot be gathered: only {self.trained} is trained")
        self._advance("gathered", version)

    def advance_served(self, version: int) -> None:
        """Note that every replica serves `version`.

        Raises StalenessViolation if a newer one was served before, or `version` is not gathered yet.
        """
        if version > self.gathered:
            raise StalenessViolation(f"version {version} cannot be served: only {self.gathered} is gathered")
        self._advance("served", version)
        for call in self._served_more:
            call()

    def subscribe(self, call: Callable[[], object]) -> None:
        """Call `call` whenever every replica serves a new version."""
        self._served_more.append(call)

    def reached(self, kind: VersionKind) -> int:
        """Return the newest version of `kind`."""
        return self._reached[kind]

    async def wait_for(self, kind: VersionKind, version: int) -> None:
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

    def _advance(self, kind: VersionKind, version: int) -> None:
        if version < self._reached[kind]:
            raise StalenessViolation(f"{kind} version cannot go back from {self._reached[kind]} to {version}")
        self._reached[kind] = version
        for waited, wanted, future in self._waiters:
            if waited == kind and wanted <= version and not future.done():
                future.set_result(None)


CALM = 4
"""Decisions above the floor for each one below it."""
MOST_PATIENCE = 64
"""Largest factor of the wait for a step up."""


class LagControl:
    """Decides after each step how many batches may be ahead of it: fewer while the importance weights of
    what is trained have too small an effective sample size.

        below the floor    one batch less, and no further decision until what was in flight then is trained
        above it           one batch more, after `CALM` times as many steps

    The lag costs nothing where the policy changes slowly, and makes a few samples dominate an update where it
    changes fast; the effective sample size, (sum w)^2 / (n sum w^2), falls before learning does (Huang et
    al., Stable Asynchrony, arXiv:2602.17616, which lowers the learning rate by it; here the lag follows it
    and no step is made smaller). A step up that had to be taken back doubles the wait for the next one.

    Only `depth` changes, within the hard bound of the lag. Pure.
    """

    def __init__(self, floor: float | None, *, least: int, most: int, depth: int | None = None) -> None:
        """`floor`: a share of the sample size, or None to stay at `most`. `depth`: where a resumed run is."""
        self._floor, self._least, self._most = floor, min(least, most), most
        self.depth = most if floor is None or depth is None else max(self._least, min(depth, most))
        self._settled = 0
        """The last step with groups that were admitted before the last change."""
        self._patience, self._good, self._raised = CALM, 0, False

    def trained(self, step: int, share: float | None) -> str | None:
        """Count a step; returns why `depth` has changed, or None.

        `share`: its effective sample size over its sample size, or None if it was not measured.
        """
        if self._floor is None or share is None or step <= self._settled:
            return None
        if share >= self._floor:
            self._good += 1
            if self.depth == self._most or self._good < self._patience * (self.depth + 1):
                return None
            return self._change(step, self.depth + 1, f"it stayed above {self._floor} for {self._good} steps")
        self._good = 0
        if self.depth == self._least:
            return None
        if self._raised:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        return self._change(step, self.depth - 1, f"it fell to {share:.3g}, below {self._floor}")

    def _change(self, step: int, depth: int, why: str) -> str:
        # Groups that are in flight now are trained by as many steps as there are batches ahead.
        self._settled, self._good = step + self.depth + 1, 0
        self._raised, self.depth = depth > self.depth, depth
        return f"{depth} batches are generated ahead: the effective sample size of a step, {why}"
