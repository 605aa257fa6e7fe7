# SPDX-License-Identifier: Apache-2.0
"""A response on its way to a reward worker, as lists of numbers or arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto


class PlainData(NamedTuple):
    """A DataProto as arrays, without `meta_info`; all dtypes must exist in numpy."""

    tensors: Mapping[str, np.ndarray[Any, Any]]
    others: Mapping[str, np.ndarray[Any, Any]]

    @classmethod
    def of(cls, data: DataProto) -> PlainData:
        """Return the arrays of a DataProto, which share its memory."""
        return cls({name: tensor.numpy() for name, tensor in data.batch.items()}, data.non_tensor_batch)

    def data(self) -> DataProto:
        """Return the DataProto with copied tensors, because arrays that Ray unpacks are read-only."""
        tensors = {name: torch.tensor(array) for name, array in self.tensors.items()}
        rows = len(next(iter(tensors.values())))
        return DataProto(batch=TensorDict(tensors, batch_size=rows), non_tensor_batch=dict(self.others))


class Response(NamedTuple):
    """One response of a model without images, as verl's agent loop has it."""

    prompts: list[Sequence[int]]
    """Tokens before the response, for each output of the agent loop."""
    responses: list[Sequence[int]]
    num_turns: list[int]
    extra_fields: list[dict[str, Any]]
    row: dict[str, Any]
    """The row of the prompt."""

    @classmethod
    def of(cls, outputs: Sequence[Any], row: Mapping[str, Any]) -> Response:
        """Return the response with these `AgentLoopOutput`s."""
        return cls(
            [one.prompt_ids for one in outputs],
            [one.response_ids for one in outputs],
            [one.num_turns for one in outputs],
            [one.extra_fields for one in outputs],
            # torch takes a millisecond to pickle a tensor.
            {name: one.numpy() if isinstance(one, torch.Tensor) else one for name, one in row.items()},
        )

    def data(self) -> DataProto:
        """Return the DataProto that verl's `AgentLoopWorker._compute_score` makes."""
        rows = len(self.prompts)
        whole = [_tokens([*a, *b]) for a, b in zip(self.prompts, self.responses, strict=True)]
        tensors = {
            "prompts": _padded([_tokens(one) for one in self.prompts]),
            "responses": _padded([_tokens(one) for one in self.responses]),
            "attention_mask": _padded([torch.ones_like(one) for one in whole]),
            "input_ids": _padded(whole),
            "position_ids": _padded([torch.arange(len(one)) for one in whole]),
        }
        others = {
            **{name: np.array([value] * rows) for name, value in self.row.items()},
            "__num_turns__": np.array(self.num_turns),
            "tool_extra_fields": np.array(self.extra_fields, dtype=object),
            "prompt_len": np.array([len(one) for one in self.prompts]),
            "response_len": np.array([len(one) for one in self.responses]),
        }
        return DataProto(batch=TensorDict(tensors, batch_size=rows), non_tensor_batch=others)


def _tokens(ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def _padded(rows: list[torch.Tensor]) -> torch.Tensor:
    if len(rows) == 1:
        return rows[0].unsqueeze(0)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
