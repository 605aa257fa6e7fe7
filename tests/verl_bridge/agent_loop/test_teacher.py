# SPDX-License-Identifier: Apache-2.0
"""A teacher reads each response of a group, and all of its answers are stored, or none."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.conftest import Load

pytestmark = pytest.mark.real_engine

ROWS = [([5, 6], [7], "sums"), ([5, 6], [8, 9], "words")]
"""Prompt, response and data source of each response of a group."""
KEYS = ["u_0_0", "u_1_0"]


class Store:
    """The part of TransferQueue that is used."""

    def __init__(self, *, chooses: bool) -> None:
        self.puts: list[tuple[list[str], str, Any]] = []
        self.chooses = chooses

    async def get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        assert (keys, partition_id) == (KEYS, "train")
        names = ("prompts", "responses", "data_source")
        assert [*names[:2]] == select_fields[:2] and len(select_fields) == 2 + self.chooses
        columns = [
            (torch.tensor(prompt), torch.tensor(response), source) for prompt, response, source in ROWS
        ]
        return list_of_dict_to_tensordict([dict(zip(names, row, strict=True)) for row in columns])

    async def put(self, *, keys: list[str], partition_id: str, fields: Any) -> None:
        self.puts.append((keys, partition_id, fields))


class Manager:
    """verl's manager of teachers, whose answer to one text may be changed."""

    teacher_key = "data_source"

    def __init__(self, teachers: tuple[str, ...], changes: dict[tuple[int, ...], Any]) -> None:
        self.asked: list[tuple[list[int], str | None]] = []
        self.teacher_model_configs = dict.fromkeys(teachers)
        self._changes = changes

    async def compute_teacher_logprobs_single(self, text: list[int], routing_key: str | None) -> Any:
        self.asked.append((text, routing_key))
        ids = torch.tensor(text, dtype=torch.int32)[:, None]
        return ids, self._changes.get(tuple(text), -ids.float())


def ask(
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[tuple[int, ...], Any] | None = None,
    *,
    as_rows: bool = True,
    teachers: tuple[str, ...] = ("default",),
) -> tuple[Manager, Store, list[Any]]:
    module: ModuleType = load("recipe.async_pipeline.verl_bridge.agent_loop.teacher")
    store, manager = Store(chooses=len(teachers) > 1), Manager(teachers, changes or {})
    queue = load("transfer_queue")
    monkeypatch.setattr(queue, "async_kv_batch_get", store.get)
    monkeypatch.setattr(queue, "async_kv_batch_put", store.put)
    return manager, store, asyncio.run(module.ask(manager, KEYS, as_rows=as_rows))


@pytest.mark.parametrize("as_rows", [True, False])
def test_the_answers_are_columns_of_the_group(
    load: Load, monkeypatch: pytest.MonkeyPatch, as_rows: bool
) -> None:
    manager, store, flaws = ask(load, monkeypatch, as_rows=as_rows)
    assert not flaws
    assert manager.asked == [([5, 6, 7], None), ([5, 6, 8, 9], None)]
    ((keys, partition, fields),) = store.puts
    assert (keys, partition, sorted(fields.keys())) == (KEYS, "train", ["teacher_ids", "teacher_logprobs"])
    ids, log_probs = (fields[name].unbind(0) for name in sorted(fields.keys()))
    assert [one.flatten().tolist() for one in ids] == [[5, 6, 7], [5, 6, 8, 9]]
    assert all(torch.equal(one, -other.float()) for one, other in zip(log_probs, ids, strict=True))


def test_one_of_several_teachers_is_chosen_by_a_column(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, store, flaws = ask(load, monkeypatch, teachers=("words", "sums"))
    assert not flaws and len(store.puts) == 1
    assert [name for _, name in manager.asked] == ["sums", "words"]
    manager, store, (flaw,) = ask(load, monkeypatch, teachers=("sums", "code"))
    assert flaw.why == "no teacher is for data_source='words', only for code, sums"
    assert not manager.asked and not store.puts


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (torch.zeros(3, 1), "the teacher returned log-probs of 3 of 4 tokens of response u_1_0"),
        (
            torch.tensor([[0.0], [float("nan")], [float("-inf")], [0.0]]),
            "the teacher's log-probs of 2 of 4 tokens of response u_1_0 are not finite",
        ),
    ],
)
def test_a_wrong_answer_is_a_flaw_and_nothing_is_stored(
    load: Load, monkeypatch: pytest.MonkeyPatch, answer: torch.Tensor, why: str
) -> None:
    _, store, flaws = ask(load, monkeypatch, {(5, 6, 8, 9): answer})
    assert [tuple(flaw)[:2] for flaw in flaws] == [("teacher_logprobs", why)]
    assert not store.puts
