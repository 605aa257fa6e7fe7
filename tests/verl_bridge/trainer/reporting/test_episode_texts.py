# SPDX-License-Identifier: Apache-2.0
"""verl's files of generations tell what the policy wrote from what it read."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recipe.async_pipeline.core.groups.items import Group, StepBatch, Trajectory, spans_of
from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer
from tests.conftest import Load

pytestmark = pytest.mark.real_engine
EOS = "<|im_end|>"
RESPONSES = {
    "u_0_0": [("R" + EOS, 1), ("\n#..G>", 0), ("é" + EOS, 1)],
    "u_1_0": [("42" + EOS, 1)],
    "pad_0_0": [("x", 0)],
}
EXTRA: dict[str, dict[str, Any]] = {
    "u_0_0": {"acc": 1.0, "pred": "46"},
    "u_1_0": {"acc": 0.0, "turns": "mine"},
}
"""What the reward function returned."""


def scores(ids: list[int]) -> list[float]:
    """Each part has a reward of 0.1 at its last token."""
    return [0.0] * (len(ids) - 1) + [0.1]


class Store:
    """A sample store, the rows in the order in which they are requested."""

    def __init__(self, tokenizer: Any, info: dict[str, Any] | None) -> None:
        self._tokenizer, self._info = tokenizer, info

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        import torch
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        assert partition_id == "train"
        rows = []
        for key in keys:
            parts = [(self._tokenizer.encode(text), mask) for text, mask in RESPONSES[key]]
            row = {
                "uid": key.partition("_")[0],
                "prompts": torch.tensor(self._tokenizer.encode(f"P.> {key}")),
                "responses": torch.tensor([token for ids, _ in parts for token in ids]),
                "loss_mask": torch.tensor([mask for ids, mask in parts for _ in ids]),
                "rm_scores": torch.tensor([score for ids, _ in parts for score in scores(ids)]),
                "reward_model": {"ground_truth": ""},
                "extra_info": self._info,
                "raw_prompt": [{"role": "user", "content": [{"type": "image", "image": f"{key}.jpg"}]}],
                "extra_fields": {"reward_extra_info": EXTRA[key]} if key in EXTRA else {},
            }
            rows.append({name: row[name] for name in select_fields})
        return list_of_dict_to_tensordict(rows)


@pytest.mark.parametrize("processor", [None, "a processor"])
@pytest.mark.parametrize(
    ("info", "columns", "place"),
    [
        ({"index": 7, "seed": 3, "split": "train"}, ["extra_info"], {"index": 7, "seed": 3}),
        ({"index": None}, ["extra_info"], {}),
        (None, [], None),
    ],
)
def test_the_parts_of_responses_are_written(
    load: Load,
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    info: Any,
    columns: list[str],
    place: Any,
    processor: Any,
) -> None:
    base, meta = load("verl.trainer.ppo.v1.trainer_base"), load("transfer_queue").KVBatchMeta
    trainer: Any = type("Trainer", (base.PPOTrainer,), {})
    trainer.__abstractmethods__ = frozenset()
    view = object.__new__(trainer)
    view.tokenizer, view.processor, view.global_steps = make_tokenizer(), processor, 4
    view._init_dump_executor()
    store = Store(view.tokenizer, info)
    for one in (module, base):
        monkeypatch.setattr(one, "tq", store)
    payload = meta(partition_id="train", keys=["u_1_0", "pad_0_0", "u_0_0"], tags=[{}, {}, {}])
    # Version 3 wrote the first of the two bytes of `é`.
    spans = spans_of([(2, 0), (3, 8), (4, 9)])
    trajectory = Trajectory(key="u_0_0", first_version=2, last_version=4, num_tokens=4, spans=spans)
    group = Group(
        uid="u",
        step=4,
        trajectories=(trajectory,),
        payload=[["responses", "raw_prompt", "extra_fields", *columns]],
    )

    module.log_rollout_data(view, StepBatch(step=4, groups=(group,), payload=payload), {}, str(tmp_path))
    view._shutdown_dump_executor()
    rows = {row["uid"]: row for row in map(json.loads, (tmp_path / "4.jsonl").read_text().splitlines())}
    assert {key: row["turns"] for key, row in rows.items()} == {
        "u_0_0": [[True, "R", 2], [False, "\n#..G>", None], [True, "", 3], [True, "é", 4]],
        "u_1_0": None,
        "pad_0_0": [[False, "x", None]],
    }
    assert {key: row["turn_rewards"] for key, row in rows.items()} == {
        "u_0_0": [0.1, 0.1],
        "u_1_0": None,
        "pad_0_0": None,
    }
    assert rows["u_0_0"]["output"] == "R\n#..G>é"
    assert [row.get("place") for row in rows.values()] == [place] * 3
    seen = {key: None if processor is None else [f"{key}.jpg"] for key in rows}
    assert {key: row.get("pictures") for key, row in rows.items()} == seen
    assert {key: (row["acc"], row["pred"]) for key, row in rows.items()} == {
        "u_0_0": (1.0, "46"),
        "u_1_0": (0.0, None),
        "pad_0_0": (None, None),
    }
