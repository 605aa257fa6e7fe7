# SPDX-License-Identifier: Apache-2.0
"""The boards of the task, and a teacher that takes a shortest way on each."""

from __future__ import annotations

import random

import pytest

from recipe.async_pipeline.agents.frozen_lake import ACTIONS, MOVES
from recipe.async_pipeline.lab.tasks.lake_task.lake import LakeTask, Teacher, best_actions

pytest.importorskip("gymnasium")
TASK = LakeTask(num_train=40, num_val=10)


def test_each_board_is_either_trained_on_or_held_out() -> None:
    sets = [set(seeds) for seed in (0, 1) for seeds in TASK.seeds(seed)]
    assert [len(seeds) for seeds in sets] == [40, 10, 40, 10]
    assert len(set.union(*sets)) == 100


def test_the_best_actions_of_a_board_by_hand() -> None:
    assert best_actions(("SFF", "HHF", "FFG")) == {
        (0, 0): "R",
        (0, 1): "R",
        (0, 2): "D",
        (1, 2): "D",
        (2, 0): "R",
        (2, 1): "R",
    }
    assert best_actions(("SF", "FG"))[0, 0] == "DR", "both ways are short"


@pytest.mark.parametrize("seed", TASK.seeds(0)[0][:20])
def test_every_best_action_leads_to_the_goal(seed: int) -> None:
    lake = TASK.make()
    lake.reset(seed)
    ways, place, steps = best_actions(lake.board), (0, 0), 0
    while place in ways:
        down, right = MOVES[ACTIONS.index(ways[place][-1])]
        place, steps = (place[0] + down, place[1] + right), steps + 1
    assert lake.board[place[0]][place[1]] == "G" and steps >= 6


def test_the_teacher_reaches_the_goal_unless_it_errs() -> None:
    teacher, rng = Teacher(TASK), random.Random(1)
    lake = TASK.make()
    reached = {0.0: 0.0, 0.6: 0.0}
    for slip_rate in reached:
        for seed in TASK.seeds(0)[0]:
            shown = teacher.show(seed, rng, slip_rate)
            assert shown.first == lake.reset(seed) and 1 <= len(shown.turns) <= TASK.max_turns
            steps = [lake.step(action) for action, _ in shown.turns]
            seen = [observation for _, observation in shown.turns]
            assert seen == [*(step.observation for step in steps[:-1]), ""]
            reached[slip_rate] += steps[-1].reward
    assert reached[0.0] >= 36, "a few shortest ways are longer than an episode"
    assert reached[0.6] < 30
