# SPDX-License-Identifier: Apache-2.0
"""Old log-probs from the forward pass of the update, where a step is one update.

The policy before the update is the one whose log-probs the update computes anyway. So the loss takes them,
detached, for the old ones, and from them the weights of verl's rollout correction, which depend on one
response only. What the update has computed is kept for the metrics that read these columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested, response_to_nested

from .loss_registry import ppo_loss_with_scores

CORRECTION = "update_log_probs"
"""Entry of a batch's `extra_info` that asks for this: verl's section `rollout_correction`; may be empty."""
_ROW = "update_row"
_KEPT = ("log_probs", "entropy")


class UpdateLogProbs:
    """The loss of a worker, and the outputs of its last update."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, torch.Tensor]] = {}
        self._keeps = True

    def begin(self, data: TensorDict, *, keeps: bool = True) -> None:
        """Forget the last update, and number the rows of the next one, which micro-batches reorder.

        `keeps`: whether this rank returns them. verl takes them from the first of a group only.
        """
        self._rows, self._keeps = {}, keeps
        data[_ROW] = torch.arange(len(data))

    def columns(self) -> TensorDict | None:
        """Return log-probs and entropy of the last update in the order of its rows, jagged (rows, tokens of
        prompt and response); None on a rank that keeps none.
        """
        if not self._rows:
            return None
        rows = [self._rows[at] for at in sorted(self._rows)]
        return tu.get_tensordict(
            {
                name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged)
                for name in _KEPT
            }
        )

    def __call__(
        self, config: Any, model_output: Any, data: TensorDict, dp_group: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        """Compute `ppo_loss_with_scores` of a micro-batch."""
        correction = tu.get(data, CORRECTION)
        if correction is None:
            return ppo_loss_with_scores(config, model_output, data, dp_group)
        if self._keeps:
            self._keep(model_output, data[_ROW].tolist())
        if not config.entropy_coeff:
            # It is only shown: its gradient would take as much memory as the logits.
            model_output = {**model_output, "entropy": model_output["entropy"].detach()}
        data = data.copy()
        data["old_log_probs"] = response_from_nested(
            model_output["log_probs"].detach(), data["response_mask"]
        )
        if correction.get("rollout_is"):
            data["rollout_is_weights"] = _weights(correction, data)
        return ppo_loss_with_scores(config, model_output, data, dp_group)

    def _keep(self, model_output: Mapping[str, torch.Tensor], rows: list[int]) -> None:
        outputs = {name: model_output[name].detach().cpu().unbind() for name in _KEPT}
        for at, row in enumerate(rows):
            self._rows[row] = {name: values[at] for name, values in outputs.items()}


def _weights(correction: Mapping[str, Any], data: TensorDict) -> torch.Tensor:
    """Return the weights that verl gives to the tokens of a micro-batch, jagged (batch, response length)."""
    padded = data.select("old_log_probs", "rollout_log_probs", "response_mask").to_padded_tensor()
    weights, _ = compute_rollout_correction_weights(
        log_ratio=padded["old_log_probs"] - padded["rollout_log_probs"],
        response_mask=padded["response_mask"],
        rollout_is=correction["rollout_is"],
        rollout_is_threshold=correction["rollout_is_threshold"],
    )
    return response_to_nested(weights, data["response_mask"])
