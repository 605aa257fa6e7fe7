# SPDX-License-Identifier: Apache-2.0
"""The score of a response, or the reason why it has none, until its row is stored.

    what a reward function, an agent or an environment gave ─► Score.of ─┐
    what went wrong ─► Score(None, why) ─────────────────────────────────┴─► ScoreRule.row ─► the stored row

Pure: takes plain values, imports neither verl nor ray nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import RewardError

FLOAT32_MAX = 3.4028234663852886e38
UNSCORED = "unscored"
"""Key in the extra fields of a reward: the reason why a response has no score, or an empty string."""


class Score(NamedTuple):
    """The score of a response, or the reason why it has none."""

    value: float | None
    why: str = ""

    @classmethod
    def of(cls, value: Any) -> Score:
        """Return the score that a value stands for.

        Accepts the numbers of any library, and arrays and tensors of one element. verl stores scores as
        float32: a number beyond its range is not finite there.
        """
        number = _number(value)
        if number is not None and abs(number) <= FLOAT32_MAX:
            return cls(number)
        beyond = ", which is beyond float32" if number is not None and math.isfinite(number) else ""
        return cls(None, f"invalid: the score must be a finite number, got {value!r}"[:450] + beyond)

    def number(self) -> float:
        """Return the value. Raises RewardError with the reason if it is missing."""
        if self.value is None:
            raise RewardError(self.why)
        return self.value


class ScoreRule:
    """What is stored of a score: `reward.failure`, `reward.default`."""

    def __init__(self, on_failure: str, default: float, names: Sequence[str] = ()) -> None:
        self.ends_run = on_failure == "fail"
        """A response without a score ends the run."""
        self._default = float(default)
        self._names = names
        """Names of the values that the function returns besides the score, as far as known."""

    def number(self, score: Score) -> float:
        """Return the number that is stored. Raises RewardError if a missing score should end the run."""
        return self._default if score.value is None and not self.ends_run else score.number()

    def row(self, score: Score, info: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        """Return the number and the extra values that are stored, the same names for each response.

        `info`: what the function returned besides the score. Raises as `number`.
        """
        number = self.number(score)
        if score.value is None:
            return number, {**dict.fromkeys(self._names, self._default), UNSCORED: score.why}
        self._names = [name for name in info if name != UNSCORED]
        return number, {**info, UNSCORED: unscored(info)}


def unscored(info: Mapping[str, Any]) -> str:
    """Return the reason why a response with these extra values has no score; empty if it has one."""
    return str(info.get(UNSCORED) or "")


def _number(value: Any) -> float | None:
    """Return what `float` makes of a number, an array or a tensor of one element; None for other values."""
    try:
        # numpy would drop the imaginary part of a number, and only warn.
        one = value.item() if hasattr(value, "item") else value
        return None if isinstance(one, str | bytes | bytearray) else float(one)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        return None
