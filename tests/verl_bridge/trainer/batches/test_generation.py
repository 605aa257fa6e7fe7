# SPDX-License-Identifier: Apache-2.0
"""Which groups are filtered, by numbers of any kind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from decimal import Decimal
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipe.async_pipeline.core.groups.bad_data import BadData, Flaw, Policies
from recipe.async_pipeline.core.groups.items import Group, Prompt, Trajectory, plain
from recipe.async_pipeline.core.groups.recall import Recall
from recipe.async_pipeline.errors import BadDataError, RolloutError
from tests import HANG_S
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


def generated(
    module: ModuleType,
    load: Load,
    metric: str,
    *infos: dict[str, Any],
    payload: Any = None,
    bad_data: Any = None,
    ask_teacher: Any = None,
    calls: Any = None,
) -> tuple[Any, Group]:
    """Return a Generation that filters by `metric`, and its group of responses with these values."""
    answers = load("recipe.async_pipeline.verl_bridge.agent_loop.responses")
    trajectories = (
        Trajectory(key=f"u_{i}_0", first_version=0, last_version=0, num_tokens=1, reward=-1.0)
        for i in range(len(infos))
    )
    done = (Group(uid="u", step=1, trajectories=tuple(trajectories)), answers.GroupFacts([], {}, infos))

    async def run_group(*args: Any) -> Any:
        return done

    names = ("finished", "redundant", "discarded")
    quiet = SimpleNamespace(**dict.fromkeys(names, lambda *args: None))
    made = module.Generation(
        manager=SimpleNamespace(run_group=run_group, ask_teacher=ask_teacher),
        prompts=SimpleNamespace(begin=lambda prompt: {}, identity=lambda uid: uid),
        calls=calls or SimpleNamespace(timeout_s=HANG_S),
        stages=None,
        meters=quiet,
        bad_data=bad_data or SimpleNamespace(refuse=lambda identity: None, judge=lambda *args: None),
        knobs=None,
        temperature=1.0,
        filter_metric=metric,
        reward_workers=list,
        served=int,
        note=lambda event, **fields: None,
        keep_output=lambda step, failed: None,
    )

    async def main() -> Group:
        prompt = Prompt(uid="u", step=1, payload=payload or {"raw_prompt": "1+1="})
        group: Group | None = await made.generate(prompt, Recall())
        assert group is not None
        return group

    return made, asyncio.run(main())


@pytest.mark.parametrize("value", [1, True, np.float32(1), np.array(1), Decimal(1)])
def test_a_group_is_filtered_by_a_number_of_any_library(module: ModuleType, load: Load, value: Any) -> None:
    made, group = generated(module, load, "acc", {"acc": value}, {"acc": 1.0})
    assert [one.filter_by for one in group.trajectories] == [1.0, 1.0]
    assert made.rejects(group) == "filtered"


@pytest.mark.parametrize(
    ("info", "shown"),
    [
        ({"acc": "high"}, "'high'"),
        ({"acc": [1, 2]}, r"\[1, 2\]"),
        ({}, "missing"),
        ({"acc": float("nan")}, "nan"),
    ],
)
def test_a_filter_without_a_number_is_one_line(
    module: ModuleType, load: Load, info: dict[str, Any], shown: str
) -> None:
    with pytest.raises(RolloutError, match=f"got 'acc', which is {shown}; choose one of reward, score$"):
        generated(module, load, "acc", {**info, "score": 1, "text": "x"})


def test_a_response_without_a_score_is_filtered_by_its_default(module: ModuleType, load: Load) -> None:
    _, group = generated(module, load, "acc", {"unscored": "timeout: x"}, {"acc": 0.5, "unscored": ""})
    assert [one.filter_by for one in group.trajectories] == [-1.0, 0.5]


def test_a_row_that_is_no_prompt_costs_its_group_alone(module: ModuleType, load: Load) -> None:
    bad_data = BadData(Policies().by_kind("fail"), attempts=1)
    _, group = generated(module, load, "acc", {}, payload={module.FLAW: "row 7: broken"}, bad_data=bad_data)
    assert group == Group(uid="u", step=1, trajectories=(), flaw="unusable_prompt: row 7: broken", payload=())
    assert bad_data.summary()["quarantined"] == [{"uid": "u", "why": group.flaw}]
    strict = BadData(Policies(unusable_prompt="fail").by_kind("fail"), attempts=1)
    with pytest.raises(
        BadDataError, match="group u is bad: unusable_prompt: row 7: broken; set faults.bad_data"
    ):
        generated(module, load, "acc", payload={module.FLAW: "row 7: broken"}, bad_data=strict)


class Calls:
    """Calls in a thread, which are noted instead."""

    timeout_s = HANG_S

    def __init__(self) -> None:
        self.made: list[Any] = []

    async def __call__(self, call: Any, **arguments: Any) -> None:
        self.made.append((call.__name__, arguments["keys"]))


@pytest.mark.parametrize("policy", ["drop", "fail"])
def test_a_group_that_its_teacher_cannot_read_fails_without_its_samples(
    module: ModuleType, load: Load, policy: Any
) -> None:
    bad_data = BadData(Policies(teacher_logprobs=policy).by_kind("fail"), attempts=3)
    answers, calls = [list[Flaw](), [Flaw("teacher_logprobs", "no log-probs")]], Calls()

    async def ask_teacher(keys: list[str]) -> list[Flaw]:
        assert keys == ["u_0_0", "u_1_0"]
        return answers.pop(0)

    told = {"bad_data": bad_data, "ask_teacher": ask_teacher, "calls": calls}
    made, group = generated(module, load, "acc", {"acc": 0.0}, {"acc": 1.0}, **told)
    group = replace(group, payload=[["responses"]])
    columns = ["responses", "teacher_ids", "teacher_logprobs"]
    assert asyncio.run(made.ask_teacher(group)) == replace(group, taught=True, payload=[columns])
    assert not calls.made, "a checkpoint writes the columns that are named"
    assert bad_data.state()["groups"] == 1, "of generation"
    if policy == "fail":
        with pytest.raises(BadDataError, match="group u is bad: teacher_logprobs: no log-probs; set faults"):
            asyncio.run(made.ask_teacher(group))
        return
    read = asyncio.run(made.ask_teacher(group))
    assert read.flaw == "teacher_logprobs: no log-probs" and made.rejects(read) == "failed"
    assert not calls.made, "a checkpoint may still name its samples"
    asyncio.run(made.discard(read))
    assert calls.made == [("kv_clear", ["u_0_0", "u_1_0"])]


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
        spans=plain(spans),
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
