# SPDX-License-Identifier: Apache-2.0
"""Tokens that are too old lose their place in the loss, and nothing else changes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from recipe.async_pipeline.core.items import Group, Trajectory
from recipe.async_pipeline.core.token_spans import spans_of

pytestmark = pytest.mark.real_engine


class Store:
    """The masks of a sample store, by key."""

    def __init__(self, **masks: list[int]) -> None:
        import torch

        self.masks = {key: torch.tensor(mask) for key, mask in masks.items()}
        self.puts: list[str] = []

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        assert (partition_id, select_fields) == ("train", ["response_mask"])
        return list_of_dict_to_tensordict([{"response_mask": self.masks[key]} for key in keys])

    def kv_batch_put(self, *, keys: list[str], partition_id: str, fields: Any) -> None:
        assert (partition_id, list(fields.keys())) == ("train", ["response_mask"])
        self.puts += keys
        self.masks |= dict(zip(keys, fields["response_mask"].unbind(0), strict=True))


def answer(key: str, tokens: int, *spans: tuple[int, int], before: int = 0) -> Trajectory:
    versions = [version for version, _ in spans]
    return Trajectory(
        key=key,
        first_version=min(versions),
        last_version=max(versions),
        num_tokens=tokens,
        spans=spans_of(spans),
        masked_before=before,
    )


def test_only_tokens_of_older_versions_are_masked(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third and the fourth token of the first response are a tool's, which is never trained."""
    store = Store(a=[1, 1, 0, 0, 1, 1, 1], b=[1, 1, 1], c=[1, 1], d=[1, 1, 1, 1])
    monkeypatch.setattr(module, "tq", store)
    old = (
        answer("a", 7, (3, 0), (4, 4), (6, 6), before=4),
        answer("b", 3, (3, 0), before=4),
        answer("c", 2, (5, 0)),
    )
    groups = [Group(uid="p", step=5, trajectories=old)]
    groups.append(Group(uid="q", step=5, trajectories=(answer("d", 4, (5, 0), (3, 1), (5, 2), before=4),)))
    for _ in range(2):
        module.mask_stale_tokens(groups, "train")
        assert {key: mask.tolist() for key, mask in store.masks.items()} == {
            "a": [0, 0, 0, 0, 1, 1, 1],
            "b": [0, 0, 0],
            "c": [1, 1],
            "d": [1, 0, 1, 1],
        }
    assert set(store.puts) == {"a", "b", "d"}
