# SPDX-License-Identifier: Apache-2.0
"""The grid of pictures is a well-formed part of the page, and empty without them."""

from __future__ import annotations

from base64 import b64decode

import pytest

from recipe.async_pipeline.observe.run_directory.picture_folder import Picture
from recipe.async_pipeline.tools.report.drawing.pictures import SHOWN_STEPS, pictures, spread
from recipe.async_pipeline.tools.report.drawing.series import Series
from tests.tools.report.pages import Page, check, page_of

NONE = Series(x=(), y=())


def drawn(step: int, number: int = 0, *, lag: int = 0, prompt: str = "a red square") -> Picture:
    return Picture(
        step=step,
        file=f"{step}-{number}.png",
        prompt=prompt,
        reward=0.5,
        first_version=step - 1 - lag,
        last_version=step - 1,
        png=f"{step}/{number}".encode(),
    )


def shown(found: list[Picture], mismatch: Series = NONE) -> Page:
    return check(page_of(pictures(found, mismatch)))


def test_without_pictures_there_is_no_section() -> None:
    assert pictures([], Series(x=[1.0], y=[0.0])) == ""


def test_a_step_is_a_row_with_its_versions() -> None:
    found = shown([drawn(1), drawn(1, 1), drawn(2, lag=1)])
    assert {"step 1", "version 0", "step 2", "versions 0 to 1", "reward 0.5"} <= set(found.texts)
    sources = [str(attrs["src"]).partition(",")[2] for attrs in found.all("img")]
    assert [b64decode(one) for one in sources] == [b"1/0", b"1/1", b"2/0"]


def test_a_prompt_is_text_and_not_markup() -> None:
    prompt = '<b>"square"</b>'
    found = shown([drawn(1, prompt=prompt)])
    assert found.all("img")[0]["alt"] == prompt and found.all("b") == [] and prompt in found.texts


def test_the_agreement_of_engine_and_trainer_is_a_chart() -> None:
    found = shown([drawn(1)], Series(x=[1.0, 2.0], y=[0.0, 1e-4]))
    assert any("Largest difference of log-probs" in text for text in found.texts)


@pytest.mark.parametrize("count", range(1, 40))
def test_shown_steps_are_spread_from_the_first_to_the_last(count: int) -> None:
    steps = list(range(1, count + 1))
    found = spread(steps, SHOWN_STEPS)
    assert len(found) == len(set(found)) == min(count, SHOWN_STEPS)
    assert (found[0], found[-1]) == (1, count) and list(found) == sorted(found)
    gaps = [b - a for a, b in zip(found, found[1:], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1
