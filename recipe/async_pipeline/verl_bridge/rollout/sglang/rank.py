# SPDX-License-Identifier: Apache-2.0
"""One rank of SGLang: loads versions, verifies them, and says how far each request is.

Its methods run in the scheduler's process between two steps, on all ranks of the engine at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from ....weight_sync.engine.serving_rank import ServingRank
from ....weight_sync.engine.versioned_engine import Salts
from ....weight_sync.memory.manifest import decode
from ....weight_sync.proof.map_check import RankShare, check_union
from .calls import SchedulerFailure, log_probs, middle_chunks

Gather = Callable[[Any], list[Any]]
"""Exchange an object with all ranks; return the ones of all, in the order of the ranks."""


class _Outcome(NamedTuple):
    """What one rank did."""

    report: dict[str, Any] | None = None
    share: RankShare | None = None
    failure: SchedulerFailure | None = None


class EngineRank:
    """The methods that the server may call."""

    def __init__(self, scheduler: Any, serving: ServingRank, gather: Gather) -> None:
        """`scheduler` is SGLang's."""
        self._scheduler, self._serving, self._gather = scheduler, serving, gather

    def check(self) -> None:
        """Nothing: an answer shows that the scheduler runs its loop."""

    def freeze(self, frozen: bool) -> None:
        """Stop to generate, or continue. Calls are answered meanwhile."""
        self._scheduler._engine_paused = frozen

    def stage(self, manifest: bytes) -> list[str | None]:
        """Begin to copy a version to the device; return the name of each rank's board, or None if it cannot
        be staged.

        Raises WeightSyncError or ProofError, on all ranks if one of them fails.
        """
        found: list[str | SchedulerFailure | None] = self._gather(self._stage(manifest))
        for one in found:
            if isinstance(one, SchedulerFailure):
                raise one.raised()
        return [one for one in found if not isinstance(one, SchedulerFailure)]

    def _stage(self, manifest: bytes) -> str | SchedulerFailure | None:
        try:
            return self._serving.stage(manifest)
        except Exception as error:  # noqa: BLE001 - other ranks wait for this one, and the server raises it
            return SchedulerFailure.of(error)

    def load(
        self, manifest: bytes, piece_bytes: int, salts: Salts | None
    ) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """Load and verify one version.

        Returns each rank's LoadReport as a dict, and the output tokens of each live request. Raises
        WeightSyncError or ProofError, on all ranks if one of them fails.
        """
        outcomes: list[_Outcome] = self._gather(self._load(manifest, piece_bytes))
        for outcome in outcomes:
            if outcome.failure is not None:
                raise outcome.failure.raised()
        shares = [outcome.share for outcome in outcomes if outcome.share is not None]
        version = decode(manifest).version
        if shares:
            check_union(version, shares)
        if salts is not None:
            self._keep_prefixes_apart(salts)
        return [outcome.report or {} for outcome in outcomes], dict(self._progress())

    def _load(self, manifest: bytes, piece_bytes: int) -> _Outcome:
        try:
            report, share = self._serving.load(manifest, piece_bytes)
        except Exception as error:  # noqa: BLE001 - other ranks wait for this one, and the server raises it
            return _Outcome(failure=SchedulerFailure.of(error))
        return _Outcome(asdict(report), share)

    def _keep_prefixes_apart(self, salts: Salts) -> None:
        """Have requests that wait for their first step use prefixes of the new version only."""
        for request in self._scheduler.waiting_queue:
            if not request.output_ids and request.extra_key is not None:
                adapter = request.lora_id or ""
                salt = request.extra_key.removesuffix(adapter)
                request.extra_key = f"{salts.renewed(salt)}{adapter}"

    def written(self, ids: list[str]) -> dict[str, tuple[list[int], list[float] | None]]:
        """Return tokens and log-probs of live requests so far; omit unknown ids."""
        found: dict[str, tuple[list[int], list[float] | None]] = {}
        for request in self._live():
            if request.rid in ids:
                tokens, values = list(request.output_ids), log_probs(request)
                if values is None or len(values) < len(tokens):
                    found[request.rid] = tokens, None
                else:
                    found[request.rid] = tokens, [float(one) for one in values[: len(tokens)]]
        return found

    def _progress(self) -> Iterator[tuple[str, int]]:
        sampled = {
            request.rid
            for batch, _ in getattr(self._scheduler, "result_queue", ())
            for request in batch.reqs
            if not (batch.forward_mode.is_extend() and middle_chunks(request) > 0)
        }
        for request in self._live():
            yield request.rid, len(request.output_ids) + (request.rid in sampled)

    def _live(self) -> Iterator[Any]:
        """Yield each unfinished request once, wherever the scheduler keeps it."""
        scheduler = self._scheduler
        # Between two steps the last batch is also the current one.
        batches = (scheduler.running_batch, scheduler.last_batch)
        places = [
            *(batch.reqs for batch in batches if batch is not None),
            scheduler.waiting_queue,
            [scheduler.chunked_req] if scheduler.chunked_req is not None else [],
            scheduler.grammar_manager.grammar_queue,
        ]
        seen = set()
        for request in (one for place in places for one in place):
            if request.rid not in seen and not request.finished():
                seen.add(request.rid)
                yield request
