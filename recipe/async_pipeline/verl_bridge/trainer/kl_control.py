# SPDX-License-Identifier: Apache-2.0
"""The KL coefficient of each step, from one state of verl's controller per step.

Batches of later steps pass the reward stage while an earlier step trains, or while its checkpoint is written.
A single controller would already contain their updates.
"""

from __future__ import annotations

import copy
from typing import Any


class KlControl:
    """The controllers after the newest steps. Batches arrive in the order of their steps."""

    def __init__(self, controller: Any, step: int) -> None:
        """Start with the state after `step`; `controller` is verl's, with a `value`."""
        self._after = {step: controller}

    def before(self, step: int) -> Any:
        """Return a controller that `step` may advance."""
        return copy.copy(self._after[step - 1])

    def advanced(self, step: int, controller: Any) -> None:
        """Keep the state after `step`."""
        self._after[step] = controller

    def value_after(self, step: int) -> float:
        """Return the coefficient after `step`."""
        return float(self._after[step].value)

    def forget_before(self, step: int) -> None:
        """Forget the states after steps that were trained before `step`."""
        self._after = {s: controller for s, controller in self._after.items() if s >= step}
