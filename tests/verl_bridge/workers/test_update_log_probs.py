# SPDX-License-Identifier: Apache-2.0
"""An update that takes its own log-probs for the old ones equals one after a pass for them, bit for bit."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from tests.conftest import Load

pytestmark = pytest.mark.real_engine

PROMPT, LENGTHS = 2, (3, 1, 4, 2)


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def some(offset: float) -> list[torch.Tensor]:
    """Rows of different numbers, a token of the response each."""
    return [-torch.arange(1.0, n + 1) * 0.3 - offset - at * 0.1 for at, n in enumerate(LENGTHS)]


def outputs() -> dict[str, list[torch.Tensor]]:
    """What a model returns for each token of prompt and response: values of the token after it."""

    def whole(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat([torch.zeros(PROMPT - 1), row, torch.zeros(1)]) for row in rows]

    return {"log_probs": whole(some(0.0)), "entropy": whole(some(-5.0))}


@pytest.fixture
def data(load: Load) -> Any:
    """The columns of a batch, without old log-probs."""
    data = load("tensordict").TensorDict(
        {
            "prompts": jagged([torch.zeros(PROMPT, dtype=torch.long) for _ in LENGTHS]),
            "responses": jagged([torch.zeros(n, dtype=torch.long) for n in LENGTHS]),
            "response_mask": jagged([torch.ones(n, dtype=torch.long) for n in LENGTHS]),
            "rollout_log_probs": jagged([row - 0.3 * torch.cos(row * 7.0) for row in some(0.0)]),
            "advantages": jagged(some(2.0)),
        },
        batch_size=len(LENGTHS),
    )
    load("verl.utils.tensordict_utils").assign_non_tensor(
        data, dp_size=1, batch_num_tokens=sum(LENGTHS), global_batch_size=len(LENGTHS)
    )
    return data


@pytest.fixture
def config(load: Load) -> Any:
    return load("verl.workers.config").ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True)


def update(
    load: Load, loss: Any, config: Any, data: Any, parts: list[list[int]]
) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses of micro-batches, and the gradient of each row's log-probs."""
    made = {name: [row.clone().requires_grad_() for row in rows] for name, rows in outputs().items()}
    losses = []
    for part in parts:
        output = {name: jagged([rows[at] for at in part]) for name, rows in made.items()}
        micro = load("verl.utils.tensordict_utils").index_select_tensor_dict(data, part)
        value, _ = loss(config=config, model_output=output, data=micro)
        value.backward()
        losses.append(value.item())
    entropies = [row.grad for row in made["entropy"]]
    assert all(grad is None or not grad.any() for grad in entropies), "the entropy is only shown"
    return losses, [row.grad for row in made["log_probs"]]  # type: ignore[misc]


@pytest.mark.parametrize(
    "correction",
    [
        {},
        {"rollout_is": "token", "rollout_is_threshold": 1.2},
        {"rollout_is": "sequence", "rollout_is_threshold": 1.2},
        {"rollout_is": "token", "rollout_is_threshold": "0.8_1.2"},
    ],
    ids=["none", "token", "sequence", "icepop"],
)
def test_an_update_takes_its_own_log_probs(
    load: Load, module: ModuleType, data: Any, config: Any, correction: dict[str, Any]
) -> None:
    tensors, parts = load("verl.utils.tensordict_utils"), [[2, 0], [3, 1]]
    asked = data.copy()
    tensors.assign_non_tensor(asked, **{module.CORRECTION: correction})
    own = module.UpdateLogProbs()
    own.begin(asked)
    found = update(load, own, config, asked, parts)

    padding = load("verl.workers.utils.padding")
    before = data.copy()
    before["old_log_probs"] = jagged(some(0.0))
    if correction:
        whole = before.select("old_log_probs", "rollout_log_probs", "response_mask").to_padded_tensor()
        batch = load("verl").DataProto(batch=whole)
        correct = load("verl.trainer.ppo.rollout_corr_helper").compute_rollout_correction_and_add_to_batch
        weights = correct(batch, correction)[0].batch["rollout_is_weights"]
        assert weights.unique().numel() > 2, "the weights differ"
        before["rollout_is_weights"] = padding.response_to_nested(weights, before["response_mask"])
    wanted = update(load, module.UpdateLogProbs(), config, before, parts)

    assert found[0] == wanted[0]
    assert all(torch.equal(one, other) for one, other in zip(found[1], wanted[1], strict=True))
    assert "old_log_probs" not in asked


def test_what_an_update_computed_is_in_the_order_of_its_rows(
    load: Load, module: ModuleType, data: Any, config: Any
) -> None:
    load("verl.utils.tensordict_utils").assign_non_tensor(data, **{module.CORRECTION: {}})
    own = module.UpdateLogProbs()
    own.begin(data, keeps=False)
    update(load, own, config, data, [[3, 1], [2, 0]])
    assert own.columns() is None, "verl fails if another rank of a group returns rows"
    own.begin(data)
    update(load, own, config, data, [[3, 1], [2, 0]])
    columns = own.columns()
    assert len(columns) == len(LENGTHS)
    for name, rows in outputs().items():
        assert all(torch.equal(a, b) for a, b in zip(columns[name].unbind(), rows, strict=True))


def test_nothing_is_kept_without_the_entry(load: Load, module: ModuleType, data: Any, config: Any) -> None:
    data["old_log_probs"] = jagged(some(0.2))
    own = module.UpdateLogProbs()
    update(load, own, config, data, [[0, 1, 2, 3]])
    assert own.columns() is None
