# SPDX-License-Identifier: Apache-2.0
"""The warm-up trains on the tokens that the agent loop will make, and counts goals."""

from __future__ import annotations

import random
from typing import Any

import pytest

from recipe.async_pipeline.errors import WarmupFailed
from recipe.async_pipeline.lab.tasks.lake_task.lake import LakeTask, Shown, Teacher
from recipe.async_pipeline.lab.tasks.lake_task.lake_warmup import LakeWarmup, encode_shown, sampled_success
from recipe.async_pipeline.lab.tasks.model import ModelSpec, make_model
from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer
from recipe.async_pipeline.lab.tasks.warmup import IGNORED, WarmupSpec

pytest.importorskip("gymnasium")
pytestmark = pytest.mark.real_engine
TASK = LakeTask(num_train=6, num_val=4)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pytest.importorskip("torch")
    return make_tokenizer()


def test_only_the_actions_are_labelled(tokenizer: Any) -> None:
    ids, labels = encode_shown(tokenizer, Shown("P>", (("R", "#>"), ("D", ""))))
    assert tokenizer.decode(ids) == "P>R<|im_end|>\n#>D<|im_end|>"
    eos, (right, down) = tokenizer.eos_token_id, tokenizer.encode("RD", add_special_tokens=False)
    assert labels == [IGNORED] * 2 + [right, eos] + [IGNORED] * 3 + [down, eos]


class Scripted:
    """A model that answers each observation with the teacher's action, or always with this letter."""

    def __init__(self, tokenizer: Any, actions: list[str]) -> None:
        self.tokenizer, self.actions, self.calls = tokenizer, actions, 0

    def eval(self) -> None:
        pass

    train = eval

    def __call__(self, *, input_ids: Any, past_key_values: Any, use_cache: bool) -> Any:
        import torch

        turn, ends = divmod(self.calls, 2)
        self.calls += 1
        eos = self.tokenizer.eos_token_id
        letters = [self.tokenizer.encode(way[turn % len(way)])[0] for way in self.actions]
        logits = torch.full((len(letters), 1, len(self.tokenizer)), -1e9)
        for row, letter in enumerate(letters):
            logits[row, 0, eos if ends else letter] = 0.0
        return type("Output", (), {"logits": logits, "past_key_values": None})


def test_the_share_of_boards_on_which_the_goal_is_reached(tokenizer: Any) -> None:
    seeds, teacher = TASK.seeds(0)[0], Teacher(TASK)
    shown = [teacher.show(seed, random.Random(1), 0.0) for seed in seeds]
    lake = TASK.make()
    ways = ["".join(action for action, _ in one.turns) for one in shown]
    rewards = []
    for seed, way in zip(seeds, ways, strict=True):
        lake.reset(seed)
        rewards.append(sum(lake.step(action).reward for action in way))
    model: Any = Scripted(tokenizer, ways)
    assert sampled_success(model, tokenizer, TASK, seeds) == sum(rewards) / len(seeds) > 0.5
    assert model.calls <= 2 * TASK.max_turns
    lost: Any = Scripted(tokenizer, ["L"] * len(seeds))
    assert sampled_success(lost, tokenizer, TASK, seeds) == 0.0
    invalid: Any = Scripted(tokenizer, ["X"] * len(seeds))
    assert sampled_success(invalid, tokenizer, TASK, seeds) == 0.0
    assert invalid.calls == 2, "all episodes are over after the first turn"


def test_the_two_phases_run_on_boards(tokenizer: Any) -> None:
    model = make_model(ModelSpec(num_layers=1, hidden_size=32, intermediate_size=32), tokenizer, seed=0)
    short = WarmupSpec(
        taught_accuracy=0.0, num_slip_steps=1, max_slip_steps=1, batch_size=4, check_every=1, min_accuracy=0.0
    )
    said: list[str] = []
    success = LakeWarmup(TASK, model, tokenizer, short, seed=0, report=said.append).run()
    assert 0.0 <= success <= 1.0 and said[0].startswith("warm-up 1 of 2, supervised: 1 steps, success")
    unreachable = WarmupSpec(taught_accuracy=1.0, max_taught_steps=1, batch_size=4, check_every=1)
    with pytest.raises(WarmupFailed, match="after 1 steps"):
        LakeWarmup(TASK, model, tokenizer, unreachable, seed=0, report=said.append).run()
