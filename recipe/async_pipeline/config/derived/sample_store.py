# SPDX-License-Identifier: Apache-2.0
"""How much the sample store has to hold, and a capacity of TransferQueue that fits it.

TransferQueue refuses rows above its capacity, which verl sets to 100,000. The store holds every response from
its end until its step was reported, so that the number follows from batch, `rollout.n` and lag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...core.groups.message_queue import share_of
from ..checks.teachers import LOSS, TOPK
from ..knobs.schema import AsyncPipelineConfig
from ..paths import select

CAPACITY = "transfer_queue.backend.SimpleStorage.total_storage_size"
BACKEND = "transfer_queue.backend.storage_backend"
BYTES_A_TOKEN = 100
"""Host memory of a token in all columns of a row; 99.5 were measured."""
BYTES_OF_TEACHER = 8
"""More for each log-prob of a teacher and the number of its token, both of 32 bits."""
REPORTED_BATCHES = 2
"""Batches that are trained and not yet freed: the one of the last report, and the one before."""
ROOM = 2
"""TransferQueue divides its capacity by its units, which need not get equal shares of the rows."""
VALIDATION_ROWS = 100_000
"""Room for a validation of unknown size: verl's whole capacity."""
CountPrompts = Callable[[], int | None]
"""Counts the prompts of a whole validation, or returns None if that is not possible here."""


@dataclass(frozen=True, kw_only=True)
class StoreBudget:
    """What the store holds at most."""

    rows: int
    """Rows in training."""
    validation_rows: int
    nbytes: int | None
    """Host memory if all rows have their full length, with the rows that are trained and freed before their
    checkpoint is written; None if a length is not configured.
    """
    capacity: int | None
    """Rows that TransferQueue takes; None if it has no limit of rows."""


def store_budget(
    config: Mapping[str, Any], knobs: AsyncPipelineConfig, count_prompts: CountPrompts = lambda: None
) -> StoreBudget:
    """Compute the budget of a resolved verl config."""
    batch = int(select(config, "data.train_batch_size"))
    n = int(select(config, "actor_rollout_ref.rollout.n"))
    ahead = batch * knobs.staleness.batches_ahead + share_of(knobs.staleness.oldest_share, batch)
    # Each conversation of an agent is a row.
    rows_each = knobs.agentic.max_chains if knobs.agentic.agent is not None else 1
    rows = (ahead + REPORTED_BATCHES * batch) * n * rows_each
    # A storage unit keeps what a checkpoint found finished until it is written.
    noted = ahead * n * rows_each if (select(config, "trainer.save_freq") or -1) > 0 else 0
    lengths = [select(config, f"data.{name}") for name in ("max_prompt_length", "max_response_length")]
    known = all(isinstance(one, int) for one in lengths)
    limited = select(config, BACKEND) == "SimpleStorage"
    capacity = select(config, CAPACITY) if limited else None
    return StoreBudget(
        rows=rows,
        validation_rows=_validation_rows(config, count_prompts) * rows_each,
        nbytes=(rows + noted) * sum(lengths) * _token_bytes(config) if known else None,
        capacity=capacity if isinstance(capacity, int) else None,
    )


def _token_bytes(config: Mapping[str, Any]) -> int:
    if not select(config, "distillation.enabled"):
        return BYTES_A_TOKEN
    likely = int(select(config, f"{LOSS}.topk")) if select(config, f"{LOSS}.loss_mode") == TOPK else 1
    return BYTES_A_TOKEN + likely * BYTES_OF_TEACHER


def _validation_rows(config: Mapping[str, Any], count_prompts: CountPrompts) -> int:
    """Return the rows of a batch of validation, with one more for its prompt; 0 if its size is unknown."""
    every = select(config, "trainer.test_freq")
    if not select(config, "trainer.val_before_train") and not (isinstance(every, int) and every > 0):
        return 0
    batch, n = select(config, "data.val_batch_size"), select(config, "actor_rollout_ref.rollout.val_kwargs.n")
    if batch is None:
        batch = count_prompts()  # verl takes all rows at once
    if not isinstance(batch, int) or not isinstance(n, int):
        return 0
    return batch * (n + 1)


def fit_capacity(
    config: Mapping[str, Any], knobs: AsyncPipelineConfig, count_prompts: CountPrompts = lambda: None
) -> dict[str, tuple[int, str]]:
    """Return the capacity to set, with the reason, by its key; empty if the configured one suffices."""
    budget = store_budget(config, knobs, count_prompts)
    needed = ROOM * budget.rows + budget.validation_rows
    if budget.capacity is None or needed <= budget.capacity:
        return {}
    enough = needed + (0 if budget.validation_rows else VALIDATION_ROWS)
    validation = f"and {budget.validation_rows} in validation, " if budget.validation_rows else ""
    why = (
        f"the store holds up to {budget.rows} rows in training, of the batches that max_lag allows, "
        f"{validation}and {budget.capacity} are too few for its parts"
    )
    return {CAPACITY: (enough, why)}
