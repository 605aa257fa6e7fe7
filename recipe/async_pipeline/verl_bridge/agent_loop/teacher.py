# SPDX-License-Identifier: Apache-2.0
"""Have teachers read finished responses: what they say of each token becomes columns of the sample store.

A teacher computes the log-probs of given tokens in one forward pass. verl asks within the agent loop, before
a response is finished; here a stage asks when its group is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
import transfer_queue

from ...core.groups.bad_data import Flaw
from ..store.sample_columns import PARTITION, TEACHER_IDS, TEACHER_LOG_PROBS, SampleColumns
from .stored_sessions import columns_of

TOKENS = ("prompts", "responses")


async def ask(manager: Any, keys: Sequence[str], *, as_rows: bool) -> list[Flaw]:
    """Ask about the responses `keys` of a group, and store the answers; returns what is wrong with these, in
    which case none is stored.

    `manager`: verl's `AsyncTeacherLLMServerManager`. `as_rows`: see `stored_sessions.put_group`. Raises what
    the teacher's replica raises.
    """
    teachers, column = manager.teacher_model_configs, manager.teacher_key
    chosen = [column] if len(teachers) > 1 else []
    rows = await transfer_queue.async_kv_batch_get(
        keys=list(keys), partition_id=PARTITION, select_fields=[*TOKENS, *chosen]
    )
    names = [str(one) for one in rows[column]] if chosen else [None] * len(keys)
    if unknown := [name for name in names if chosen and name not in teachers]:
        return [_flaw(f"no teacher is for {column}={unknown[0]!r}, only for {', '.join(sorted(teachers))}")]
    texts = [[token for part in TOKENS for token in rows[part][i].tolist()] for i in range(len(keys))]
    answers = await asyncio.gather(
        *(
            manager.compute_teacher_logprobs_single(text, routing_key=name)
            for text, name in zip(texts, names, strict=True)
        )
    )
    flaws = [
        _flaw(why)
        for key, text, (_, log_probs) in zip(keys, texts, answers, strict=True)
        if (why := _fault(key, len(text), log_probs))
    ]
    if not flaws:
        fields = [{TEACHER_IDS: ids, TEACHER_LOG_PROBS: log_probs} for ids, log_probs in answers]
        columns = SampleColumns(fields) if as_rows else columns_of(fields)
        await transfer_queue.async_kv_batch_put(keys=list(keys), partition_id=PARTITION, fields=columns)
    return flaws


def _flaw(why: str) -> Flaw:
    return Flaw("teacher_logprobs", why)


def _fault(name: str, tokens: int, log_probs: torch.Tensor) -> str:
    if len(log_probs) != tokens:
        return f"the teacher returned log-probs of {len(log_probs)} of {tokens} tokens of response {name}"
    if bad := int((~torch.isfinite(log_probs)).any(-1).sum()):
        return f"the teacher's log-probs of {bad} of {tokens} tokens of response {name} are not finite"
    return ""
