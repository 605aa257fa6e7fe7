# SPDX-License-Identifier: Apache-2.0
"""Clipping is reported once, and only where nothing but rounding explains it."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.core.groups.items import Group, StepBatch, Trajectory
from recipe.async_pipeline.observe.samples.precision import CLIP_FRACTION, PrecisionCheck


def batch(*versions: int, step: int = 5, clipped: float | None = 0.4) -> StepBatch:
    trajectories = tuple(
        Trajectory(key=f"a_{n}_0", first_version=version, last_version=step - 1, num_tokens=3)
        for n, version in enumerate(versions)
    )
    metrics = {} if clipped is None else {CLIP_FRACTION: clipped}
    group = Group(uid="a", step=step, trajectories=trajectories)
    return StepBatch(step=step, groups=(group,), metrics=metrics)


def test_it_is_reported_once() -> None:
    check = PrecisionCheck("bfloat16", "fp32", 1e-3)
    text = check.warning(batch(4, 4))
    assert text is not None and text.startswith("precision: 40% of the steps")
    assert "engine (bfloat16)" in text and "trainer (fp32)" in text and "range 0.001;" in text
    assert check.warning(batch(4, 4)) is None


@pytest.mark.parametrize(
    "other", [batch(4, 3), batch(4, clipped=0.0), batch(4, clipped=0.01), batch(4, clipped=None)]
)
def test_older_images_and_little_clipping_are_expected(other: StepBatch) -> None:
    check = PrecisionCheck("bfloat16", "fp32", 1e-3)
    assert check.warning(other) is None
    assert check.warning(batch(4)) is not None, "it still looks"
