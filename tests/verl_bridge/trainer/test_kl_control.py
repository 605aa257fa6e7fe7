# SPDX-License-Identifier: Apache-2.0
"""Each step has its own KL coefficient, with any number of steps in the pipeline."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.verl_bridge.trainer.kl_control import KlControl


class Adaptive:
    """Stands for verl's adaptive controller, which changes its value in place."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self) -> None:
        self.value *= 2


def test_each_step_has_its_coefficient() -> None:
    control = KlControl(Adaptive(1.0), step=4)
    for step in (5, 6, 7):
        controller = control.before(step)
        controller.update()
        control.advanced(step, controller)
    assert [control.value_after(step) for step in (4, 5, 6, 7)] == [1.0, 2.0, 4.0, 8.0]


def test_a_repeated_stage_starts_from_the_same_state() -> None:
    control = KlControl(Adaptive(1.0), step=0)
    control.before(1).update()
    assert control.before(1).value == 1.0


def test_states_before_a_trained_step_are_forgotten() -> None:
    control = KlControl(Adaptive(1.0), step=0)
    for step in range(1, 5):
        control.advanced(step, control.before(step))
    control.forget_before(3)
    assert control.value_after(3) == 1.0
    assert control.value_after(4) == 1.0
    with pytest.raises(KeyError):
        control.value_after(2)
