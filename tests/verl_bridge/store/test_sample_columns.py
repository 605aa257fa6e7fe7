# SPDX-License-Identifier: Apache-2.0
"""TransferQueue stores and sends the same as with verl's TensorDict."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.real_engine


def response_fields(prompt: int, response: int, number: int) -> dict[str, Any]:
    """Return what an agent loop stores for a response, by its lengths."""
    import torch

    return {
        "prompts": torch.arange(prompt),
        "responses": torch.arange(response) + number,
        "position_ids": torch.arange(4 * (prompt + response)).reshape(-1, 4),
        "rm_scores": torch.linspace(0, 1, response),
        "num_turns": number,
        "raw_prompt": [{"role": "user", "content": "1+1="}],
        "extra_fields": {"turn_scores": [], "number": number},
        "data_source": "addition",
        "mostly": None if number % 2 else torch.arange(2),
    }


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
@settings(max_examples=100, deadline=None)
def test_transfer_queue_stores_and_sends_the_same(
    module: ModuleType, lengths: list[tuple[int, int]], random: Any
) -> None:
    import torch
    from transfer_queue.metadata import extract_field_schema
    from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    rows = [response_fields(prompt, response, i) for i, (prompt, response) in enumerate(lengths)]
    plain, verls = module.SampleColumns(rows), list_of_dict_to_tensordict(rows)
    assert plain.batch_size[0] == verls.batch_size[0]
    assert list(plain.keys()) == list(verls.keys())

    schema, verls_schema = extract_field_schema(plain), extract_field_schema(verls)
    del schema["mostly"], verls_schema["mostly"]
    assert schema == verls_schema

    positions = sorted(random.sample(range(len(rows)), random.randint(1, len(rows))))
    for name in plain:
        if name == "mostly":  # a tensor among others: compared by hand
            assert [value is None for value in plain[name]] == [i % 2 == 1 for i in range(len(rows))]
            continue
        sent, verls_sent = (
            AsyncSimpleStorageManager._select_by_positions(one[name], positions) for one in (plain, verls)
        )
        assert isinstance(sent, list) == isinstance(verls_sent, list)
        for one, other in zip(sent, verls_sent, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_training_workers_fetch_numeric_columns_only(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transfer_queue import KVBatchMeta

    requested = []

    class Client:
        def kv_retrieve_meta(self, keys: list[str], partition_id: str) -> Any:
            requested.append((keys, partition_id))
            names = {
                "responses": False,
                "advantages": False,
                "raw_prompt": True,
                "extra_fields": True,
                "multi_modal_inputs": True,
                "condition_pooled_projections": False,
                "conditions_in": True,
            }
            return SimpleNamespace(
                field_schema={name: {"is_non_tensor": flag} for name, flag in names.items()}
            )

    monkeypatch.setattr(module.tq, "get_client", Client)
    batch = KVBatchMeta(partition_id="train", keys=["a_0_0"], tags=[{}])
    trained = ["responses", "advantages", "conditions_in"]
    assert module.trained_columns(batch, pictures=False) == trained
    assert module.trained_columns(batch, pictures=True) == [*trained[:2], "multi_modal_inputs", trained[2]]
    assert requested == [(["a_0_0"], "train")] * 2
