# SPDX-License-Identifier: Apache-2.0
"""The responses to each prompt, drawn from a seed and the prompt's number alone.

Prompt k has the same responses in any layout and strategy, so two simulations differ by their schedules and
not by luck.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ..distribution import Distribution, from_normal, is_constant, largest
from ..profile import Profile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]

CHUNK = 256
"""Prompts that are drawn together; changing it changes the draws of a seed."""
KEPT_CHUNKS = 32
"""Chunks whose costs are kept, because a search simulates the same prompts in many layouts. With 16 responses
of 12 turns each, a chunk is about 3 MB.
"""


class ResponseCost(NamedTuple):
    """The work and the waits of one response."""

    prompt_tokens: float
    turn_tokens: tuple[int, ...]
    """Tokens that the model writes in each turn."""
    tool_s: tuple[float, ...]
    """Seconds of waiting after each turn but the last, including the request."""
    reward_s: float
    """Seconds from the last turn to the score, including the request."""
    tokens: int
    """Tokens to train on: prompt, turns and observations."""


class GroupCost(NamedTuple):
    """All responses to one prompt."""

    answers: tuple[ResponseCost, ...]
    fails: bool
    """Whether the group cannot be scored."""


class Chunk(NamedTuple):
    """Arrays of [groups, responses], except `tool_s` [groups, responses, turns - 1] and `fails` [groups]."""

    tokens: Floats
    prompt_tokens: Floats
    turns: Floats
    tool_s: Floats
    reward_s: Floats
    fails: Bools


class Draws:
    """The groups of a profile, numbered from 0."""

    def __init__(self, profile: Profile, seed: int) -> None:
        self.profile, self._seed = profile, seed
        self._chunk = lru_cache(maxsize=2)(self._draw)
        self._at = -1
        self._ready: Sequence[GroupCost] = ()

    def group(self, number: int) -> GroupCost:
        """Return the costs of one prompt's responses. Cheapest when called in order."""
        at, index = divmod(number, CHUNK)
        if at != self._at:
            self._at, self._ready = at, _costs(self.profile, self._seed, at)
        return self._ready[index]

    def chunk(self, at: int) -> Chunk:
        """Return the CHUNK groups from number `at` x CHUNK on, as arrays."""
        return self._chunk(at)

    def _draw(self, at: int) -> Chunk:
        import numpy as np

        answers, n = self.profile.answers, self.profile.batch.answers
        random = np.random.default_rng([self._seed, at])
        shape = (CHUNK, n)
        share = answers.prompt_share
        z = np.sqrt(share) * random.standard_normal((CHUNK, 1)) + np.sqrt(1 - share) * random.standard_normal(
            shape
        )

        turns = np.maximum(1, np.rint(from_normal(answers.turns, random.standard_normal(shape))))
        waits = max(0, round(largest(answers.turns)) - 1)
        return Chunk(
            tokens=np.maximum(turns, np.rint(from_normal(answers.tokens, z))),
            prompt_tokens=np.broadcast_to(
                np.rint(from_normal(answers.prompt_tokens, random.standard_normal((CHUNK, 1)))), shape
            ),
            turns=turns,
            tool_s=_waits(answers.tool_s, random, (CHUNK, n, waits)) + answers.request_s,
            reward_s=_waits(answers.reward_s, random, shape) + answers.request_s,
            fails=random.random(CHUNK) < self.profile.failures.group,
        )


@lru_cache(maxsize=KEPT_CHUNKS)
def _costs(profile: Profile, seed: int, at: int) -> Sequence[GroupCost]:
    """Return the groups of a chunk, which are the same in all layouts."""
    return tuple(_as_costs(Draws(profile, seed).chunk(at), profile.answers.observation_tokens))


def _as_costs(chunk: Chunk, observed: float) -> Iterator[GroupCost]:
    columns = (chunk.tokens, chunk.prompt_tokens, chunk.turns, chunk.tool_s, chunk.reward_s)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for of_group, fails in zip(rows, chunk.fails.tolist(), strict=True):
        answers = [_answer(observed, *of_one) for of_one in zip(*of_group, strict=True)]
        yield GroupCost(tuple(answers), fails)


def _waits(of: Distribution, random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    import numpy as np

    return from_normal(of, np.zeros(shape) if is_constant(of) else random.standard_normal(shape))


def _answer(
    observed: float, tokens: float, prompt: float, turns: float, tools: list[float], reward: float
) -> ResponseCost:
    """Return one response's cost: tokens are spread evenly over the turns, the remainder to the last one."""
    written, count = int(tokens), int(turns)
    each = written // count
    return ResponseCost(
        prompt_tokens=prompt,
        turn_tokens=(*(each,) * (count - 1), written - each * (count - 1)),
        tool_s=tuple(tools[: count - 1]),
        reward_s=reward,
        tokens=int(prompt + written + observed * (count - 1)),
    )


def alone_s(profile: Profile, chunk: Chunk) -> Floats:
    """Return the seconds from each request to its score on an idle replica, [groups, responses]."""
    import numpy as np

    decode = profile.decode
    read = chunk.prompt_tokens + (chunk.turns - 1) * profile.answers.observation_tokens
    counted = np.arange(1, chunk.tool_s.shape[2] + 1) < chunk.turns[:, :, None]
    waited = (chunk.tool_s * counted).sum(axis=2) + chunk.reward_s
    total: Floats = read * decode.prefill_token_s + chunk.tokens * decode.step_s(1) + waited
    return total
