# SPDX-License-Identifier: Apache-2.0
"""Score a generated batch with the reward workers that otherwise score each response when it finishes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl import DataProto

from ...config.knobs.schema import AsyncPipelineConfig
from ...core.groups.scores import Score, ScoreRule
from ..calls.ray_calls import got

NOT_FOR_REWARDS = (
    "input_ids",
    "position_ids",
    "loss_mask",
    "rollout_log_probs",
    "extra_fields",
    "multi_modal_inputs",
)
"""Columns that a reward worker does not use."""


def score_batch(workers: Sequence[Any], batch: KVBatchMeta, knobs: AsyncPipelineConfig) -> list[float]:
    """Score every response and store its score in verl's column. Returns the scores. Blocks.

    Raises WaitTimeout if the workers take too long, RewardError if a score is not a finite number, and the
    error of the reward function.
    """
    stored = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
    lengths = stored["responses"].offsets().diff().tolist()

    names = [
        name
        for name in stored.keys()
        if name not in NOT_FOR_REWARDS and not isinstance(stored[name], torch.Tensor)
    ]
    others = {name: [getattr(value, "data", value) for value in stored[name]] for name in names}
    if "extra_fields" in stored.keys():
        others["tool_extra_fields"] = [getattr(value, "data", value) for value in stored["extra_fields"]]
    if "num_turns" in stored.keys():
        others["__num_turns__"] = [int(value) for value in stored["num_turns"]]

    rows = [
        _row(
            stored["prompts"][i], stored["responses"][i], {name: values[i] for name, values in others.items()}
        )
        for i in range(len(batch.keys))
    ]
    round_robin = itertools.cycle(workers)
    calls = [next(round_robin).compute_score.remote(row) for row in rows]
    results: list[Mapping[str, Any]] = got(
        calls, knobs.faults.wait_timeout_s, owner="rollout", what=f"scores of {len(rows)} responses"
    )
    rule = ScoreRule(knobs.reward.failure, knobs.reward.default)
    numbers = [rule.number(Score.of(result["reward_score"])) for result in results]

    scores = torch.nested.as_nested_tensor(
        [_at_last_token(number, length) for number, length in zip(numbers, lengths, strict=True)],
        layout=torch.jagged,
    )
    fields = TensorDict({"rm_scores": scores}, batch_size=len(batch.keys))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
    return numbers


def _row(prompt: torch.Tensor, response: torch.Tensor, others: Mapping[str, Any]) -> DataProto:
    """Return one response as verl's agent loop passes it to a reward worker."""
    mask = torch.ones(1, len(prompt) + len(response), dtype=torch.int64)
    tensors = {"prompts": prompt.unsqueeze(0), "responses": response.unsqueeze(0), "attention_mask": mask}
    plain: dict[str, Any] = {}
    for name, value in others.items():
        plain[name] = np.empty(1, dtype=object)
        plain[name][0] = value
    return DataProto(batch=TensorDict(tensors, batch_size=1), non_tensor_batch=plain)


def _at_last_token(score: float, length: int) -> torch.Tensor:
    scores = torch.zeros(length)
    scores[-1:] = score
    return scores
