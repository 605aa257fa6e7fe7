# SPDX-License-Identifier: Apache-2.0
"""Check responses in the process of verl's agent loops, before they are stored: `core.groups.bad_data`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ray.exceptions import RayTaskError

from ...core.groups.bad_data import Flaw, flaws_of, flaws_of_group, long_prompt, not_a_score, score_of
from ...errors import BadDataError, RewardError
from ...redaction import without_secrets
from ..calls.ray_calls import cause_of
from ..reward.manager import UNSCORED
from .episodes.episode import current_episode, episode_with
from .tokens.version_spans import ResponseTurn, writer_of


class LongPrompt(BadDataError):
    """Ends the agent loop of a prompt that is too long."""


@contextmanager
def found_flaws(into: list[Flaw]) -> Iterator[None]:
    """Collect the flaws that are noted inside, by this task and its child tasks. For training, not for
    validation.
    """
    with episode_with(flaws=into), suppress(LongPrompt):
        yield


CutPrompt = Callable[[Any, list[int]], list[int]]


class Checks:
    """The checks of each response of a run."""

    def __init__(self, policies: Mapping[str, str], prompt_limit: int) -> None:
        """`policies`: by kind; `prompt_limit`: tokens of a prompt."""
        self._policies, self._prompt_limit = policies, prompt_limit

    def refusing_long_prompts(self, cut: CutPrompt) -> CutPrompt:
        """Return verl's `_cap_text_prompt_length`, but refuse prompts that are too long.

        verl cuts off their beginning, which holds the instructions. Validation keeps verl's behaviour.
        """

        def refuse_or_cut(loop: Any, prompt_ids: list[int]) -> list[int]:
            flaws = current_episode().flaws
            if flaws is not None and len(prompt_ids) > self._prompt_limit:
                flaws.append(long_prompt(len(prompt_ids), self._prompt_limit))
                if not self.usable(flaws):
                    raise LongPrompt(str(flaws[-1]))
            return cut(loop, prompt_ids)

        return refuse_or_cut

    def usable(self, flaws: Sequence[Flaw]) -> bool:
        """Return whether a group with these flaws is to be trained."""
        return all(self._policies[flaw.kind] == "keep" for flaw in flaws)

    def passes(self, key: str, output: Any, turns: Sequence[ResponseTurn]) -> bool:
        """Return whether verl can store this response and a step can train on it; notes its flaws.

        In validation every response passes. `output`: verl's AgentLoopOutput.
        """
        flaws = current_episode().flaws
        if flaws is None:
            return True
        found = flaws_of(
            key,
            prompt_tokens=len(output.prompt_ids),
            prompt_limit=self._prompt_limit,
            answer_tokens=len(output.response_ids),
            logprobs=output.response_logprobs,
            writer=lambda token: writer_of(turns, len(output.prompt_ids), token),
        )
        flaws += found
        return self.usable(found)


def flaws_together(
    expected: int, flaws: Sequence[Sequence[Flaw]], sound: Sequence[Mapping[str, Any]]
) -> list[Flaw]:
    """Return the flaws of a group: of each response, and of all together. `sound`: what verl would store
    for the responses without flaw.
    """
    sessions = {int(fields["session_id"]) for fields in sound} | {i for i, found in enumerate(flaws) if found}
    infos = [(fields.get("extra_fields") or {}).get("reward_extra_info") or {} for fields in sound]
    return [flaw for found in flaws for flaw in found] + flaws_of_group(
        expected=expected,
        present=len(sessions),
        unmasked=[int(fields["response_mask"].sum()) for fields in sound],
        unscored=[str(info[UNSCORED]) for info in infos if info.get(UNSCORED)],
    )


class Scores:
    """The handling of a response that the reward function could not score: `reward.failure`,
    `reward.default`.
    """

    def __init__(self, on_failure: str, default: float) -> None:
        self._on_failure, self._default = on_failure, default
        self._names: list[str] = []
        """Names of the values that the function returns besides the score, as far as known."""

    def failed(self, error: RayTaskError) -> str:
        """Describe a failed call. Raises the error if it should end the run."""
        if self._on_failure == "fail":
            raise error
        cause = cause_of(error)
        return without_secrets(f"raised: {type(cause).__name__}: {cause}".splitlines()[0])[:500]

    def settle(self, answer: Any, why: str) -> None:
        """Give a response its score, or the default. `why`: the reason why the call failed; empty if
        it did not.

        Raises RewardError if the response has no score and that should end the run.
        """
        number = score_of(answer.reward_score)
        if number is not None:
            answer.reward_score = number
        elif not why:
            why = not_a_score(answer.reward_score)
        if self._on_failure == "fail":
            if why:
                raise RewardError(why)
            return
        info = answer.extra_fields.get("reward_extra_info") or {}
        if why:
            answer.reward_score = self._default
            info = {**dict.fromkeys(self._names, self._default), UNSCORED: why}
        else:
            self._names = [name for name in info if name != UNSCORED]
            info = {**info, UNSCORED: info.get(UNSCORED, "")}
        answer.extra_fields["reward_extra_info"] = info
