# SPDX-License-Identifier: Apache-2.0
"""Compare the values of verl's Megatron critic with transformers' layers and the same head.

`layouts.py` forks the ranks.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.verl_bridge.workers.megatron.layouts import (
    EPSILON,
    PROMPT,
    Check,
    Layout,
    distance,
    parallel,
    reference,
)

LAYOUTS = {
    "values-tp2": Layout("qwen3", 2, parallel(tensor=2)),
    "values-tp2-without-sequence-parallel": Layout(
        "qwen3", 2, {**parallel(tensor=2), "sequence_parallel": False}
    ),
    "values-tied-pp2": Layout("qwen2", 2, parallel(pipeline=2)),
    "values-ep2": Layout("qwen3_moe", 2, parallel(expert=2)),
}


def check(folder: Path, name: str, layout: Layout) -> dict[str, Any]:
    return Values(folder, name, layout).run()


class Values(Check):
    """One rank of one layout."""

    model_type = "value_model"

    def run(self) -> dict[str, Any]:
        heads: list[Any] = [None] * self.layout.ranks
        dist.all_gather_object(heads, self.head())
        held = [head for head in heads if head is not None]
        critic = Critic(reference(self.path), held[0])
        measured: dict[str, Any] = {
            "outputs": self.engine.is_mp_src_rank_with_outputs(),
            "heads": all(torch.equal(head, held[0]) for head in held),
            "before": self.compare(critic),
        }
        with self.engine.train_mode():
            trained = self.engine.train_batch(self.batch(), squared_error)
        untrained = deepcopy(critic)
        norm = self.step(critic)
        if measured["outputs"]:
            measured["grad_norm"] = [float(trained["metrics"]["grad_norm"]), norm]
        measured["after"], measured["moved"] = self.compare(critic), self.compare(untrained)
        return measured

    def compare(self, critic: Critic) -> float | None:
        """Return the largest difference of values, or None on a rank without any."""
        with self.engine.eval_mode():
            output = self.engine.infer_batch(self.batch())
        if not self.engine.is_mp_src_rank_with_outputs():
            return None
        found = output["model_output"]["values"].unbind()
        with torch.no_grad():
            return max(
                distance(row.flatten(), critic.values(self.rows[index]))
                for index, row in zip(self.mine(), found, strict=True)
            )

    def head(self) -> torch.Tensor | None:
        """Return the value head that this rank holds, (1, hidden), or None without the last layers."""
        for chunk in self.engine.module:
            for name, weight in chunk.named_parameters():
                if name.endswith("output_layer.weight"):
                    return weight.detach().clone()
        return None

    def step(self, critic: Critic) -> float:
        """Take AdamW's step in transformers; return the norm of the gradient before it was clipped."""
        optimizer = torch.optim.AdamW(
            critic.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.999), eps=EPSILON
        )
        tokens = sum(len(row) - PROMPT for row in self.rows)
        losses = [((critic.values(row)[PROMPT:] - 1) ** 2).sum() / tokens for row in self.rows]
        torch.stack(losses).sum().backward()
        norm = float(torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0))
        optimizer.step()
        return norm


class Critic(torch.nn.Module):
    """Layers of transformers under a value head."""

    def __init__(self, model: Any, head: torch.Tensor) -> None:
        super().__init__()
        self.model = model.model
        self.lm_head = torch.nn.Parameter(head.clone())

    def values(self, row: torch.Tensor) -> torch.Tensor:
        """Return a value for each token of `row`, (tokens,)."""
        hidden: torch.Tensor = self.model(input_ids=row[None]).last_hidden_state[0]
        return (hidden @ self.lm_head.T)[:, 0]


def squared_error(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """Return the mean square of value - 1 over all response tokens of all ranks."""
    from verl.utils import tensordict_utils as tu

    values = model_output["values"]
    values = (values.values() if values.is_nested else values).reshape(-1)
    mask = torch.cat(list(data["loss_mask"].unbind()))
    tokens = tu.get_non_tensor_data(data, key="batch_num_tokens", default=None)
    ranks = tu.get_non_tensor_data(data, key="dp_size", default=1)
    return ((values - 1) ** 2 * mask).sum() / tokens * ranks, {}
