# SPDX-License-Identifier: Apache-2.0
"""The same seed and number give the same responses, in any order of calls."""

from __future__ import annotations

import numpy as np
import pytest

from recipe.async_pipeline.tools.plan.distribution import Histogram, Lognormal
from recipe.async_pipeline.tools.plan.profile import Answers, Batch, Decode, Failures
from recipe.async_pipeline.tools.plan.simulated.draws import CHUNK, Draws, _costs, alone_s
from tests.tools.plan.workloads import profile


def test_a_group_depends_on_its_number_alone() -> None:
    of = profile(answers=Answers(tokens=Lognormal(median=50, sigma=1, cap=500)))
    forwards, backwards = Draws(of, 1), Draws(of, 1)
    numbers = [0, 3, CHUNK, 2 * CHUNK + 1]
    drawn = [forwards.group(n) for n in numbers]
    _costs.cache_clear()
    assert drawn == [backwards.group(n) for n in reversed(numbers)][::-1]
    assert Draws(of, 2).group(0) != forwards.group(0)


def test_layouts_share_the_responses_of_a_seed() -> None:
    of = profile(answers=Answers(tokens=Lognormal(median=50, sigma=1, cap=500)))
    assert Draws(of, 1).group(5) is Draws(of, 1).group(5)


def test_turns_share_the_tokens_and_tools_run_between_them() -> None:
    of = profile(
        answers=Answers(
            tokens=11.0,
            turns=3.0,
            tool_s=0.5,
            observation_tokens=4.0,
            prompt_tokens=7.0,
            request_s=0.1,
            reward_s=0.2,
        )
    )
    (answer, _) = Draws(of, 1).group(0).answers
    assert answer.turn_tokens == (3, 3, 5)
    assert answer.tool_s == pytest.approx((0.6, 0.6))
    assert answer.reward_s == pytest.approx(0.3)
    assert answer.tokens == 7 + 11 + 2 * 4


def test_responses_to_one_prompt_correlate_as_the_profile_says() -> None:
    def correlation(share: float) -> float:
        of = profile(
            batch=Batch(groups=1, answers=2),
            answers=Answers(tokens=Lognormal(median=1e6, sigma=1, cap=1e12), prompt_share=share),
        )
        tokens = np.concatenate([np.log(Draws(of, 1).chunk(at).tokens) for at in range(20)])
        return float(np.corrcoef(tokens.T)[0, 1])

    for share in (0.0, 0.5, 1.0):
        assert correlation(share) == pytest.approx(share, abs=0.05)


def test_groups_fail_with_the_profiles_probability() -> None:
    draws = Draws(profile(failures=Failures(group=0.25)), 1)
    assert np.mean([draws.group(n).fails for n in range(4 * CHUNK)]) == pytest.approx(0.25, abs=0.05)


def test_a_response_alone_takes_the_sum_of_its_parts() -> None:
    of = profile(
        answers=Answers(
            tokens=10.0,
            prompt_tokens=5.0,
            turns=Histogram(values=(1, 3), weights=(1, 1)),
            tool_s=0.5,
            observation_tokens=2.0,
            reward_s=0.25,
        ),
        decode=Decode(token_s=(0.1,), prefill_token_s=0.01),
    )
    chunk = Draws(of, 1).chunk(0)
    expected = 1.0 + 0.05 + 0.25 + (chunk.turns - 1) * (0.5 + 2 * 0.01)
    assert alone_s(of, chunk) == pytest.approx(expected)
