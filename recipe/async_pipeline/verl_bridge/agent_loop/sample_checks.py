# SPDX-License-Identifier: Apache-2.0
"""Check responses in the process of verl's agent loops, before they are stored: `core.groups.bad_data`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ray.exceptions import RayTaskError

from ...core.groups.bad_data import UNUSABLE_PROMPT, Flaw, flaws_of, flaws_of_group, long_prompt
from ...core.groups.scores import Score, ScoreRule, unscored
from ...errors import BadDataError
from ...redaction import without_secrets
from ..calls.ray_calls import cause_of
from .episodes.episode import current_episode, episode_with
from .prompt_pictures import misplaced
from .responses import reward_info_of
from .tokens.version_spans import ResponseTurn, writer_of


class UnusablePrompt(BadDataError):
    """Ends the agent loop of a prompt that is too long, or cannot be shown to the model."""


@contextmanager
def found_flaws(into: list[Flaw]) -> Iterator[None]:
    """Collect the flaws that this task and its child tasks note inside. For training, not for validation."""
    with episode_with(flaws=into), suppress(UnusablePrompt):
        yield


Prepare = Callable[..., Awaitable[Any]]
CutPrompt = Callable[[Any, list[int]], list[int]]


class Checks:
    """The checks of each response of a run."""

    def __init__(
        self, policies: Mapping[str, str], prompt_limit: int, media: Mapping[str, int] | None = None
    ) -> None:
        """`policies`: by kind; `prompt_limit`: tokens of a prompt. `media`: the token that stands for a part
        of a picture or video, by verl's name of these media, where their places in the text decide positions.
        """
        self._policies, self._prompt_limit, self._media = policies, prompt_limit, media or {}

    def refusing_long_prompts(self, cut: CutPrompt) -> CutPrompt:
        """Return verl's `_cap_text_prompt_length`, but refuse prompts that are too long.

        verl cuts off their beginning, which holds the instructions. Validation keeps verl's behaviour.
        """

        def refuse_or_cut(loop: Any, prompt_ids: list[int]) -> list[int]:
            flaws = current_episode().flaws
            if flaws is not None and len(prompt_ids) > self._prompt_limit:
                flaws.append(long_prompt(len(prompt_ids), self._prompt_limit))
                if not self.usable(flaws):
                    raise UnusablePrompt(str(flaws[-1]))
            return cut(loop, prompt_ids)

        return refuse_or_cut

    def refusing_unusable_prompts(self, prepare: Prepare) -> Prepare:
        """Return a method of verl's agent loops that reads or tokenizes a prompt, but note its errors as a
        flaw of the prompt where a model takes pictures: another attempt at the episode would repeat them.

        Validation repeats the episode as if its agent had failed.
        """

        async def prepare_or_refuse(loop: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return await prepare(loop, *args, **kwargs)
            except Exception as error:
                flaws = current_episode().flaws
                if flaws is None or loop.processor is None or isinstance(error, UnusablePrompt):
                    raise
                flaws.append(unusable_prompt(error))
                raise UnusablePrompt(str(flaws[-1])) from error

        return prepare_or_refuse

    def refusing_pictures(self, read: Prepare) -> Prepare:
        """Return verl's `process_multi_modal_info`; more pictures than the engine takes are an error, too."""

        async def read_and_count(loop: Any, messages: Any) -> Any:
            found = await read(loop, messages)
            pictures, limit = len(found.get("images") or ()), loop.rollout_config.get("limit_images")
            if limit and pictures > limit:
                raise BadDataError(f"it has {pictures} pictures, and rollout.limit_images is {limit}")
            return found

        return self.refusing_unusable_prompts(read_and_count)

    def usable(self, flaws: Sequence[Flaw]) -> bool:
        """Return whether a group with these flaws is to be trained."""
        return all(self._policies[flaw.kind] == "keep" for flaw in flaws)

    def refuse_misplaced(self, outputs: Sequence[Any], name: str) -> None:
        """Raise UnusablePrompt if the text of a response has places for other pictures than it shows.

        For validation, which repeats such an episode as if its agent had failed; in training it is a flaw.
        """
        for output in outputs:
            for flaw in self._misplaced(name, output):
                raise UnusablePrompt(flaw.why)

    def passes(self, key: str, output: Any, turns: Sequence[ResponseTurn]) -> bool:
        """Return whether verl can store this response and a step can train on it; notes its flaws.

        In validation every response passes. `output`: verl's AgentLoopOutput.
        """
        flaws = current_episode().flaws
        if flaws is None:
            return True
        found = self._misplaced(key, output) + flaws_of(
            key,
            prompt_tokens=len(output.prompt_ids),
            prompt_limit=self._prompt_limit,
            response_tokens=len(output.response_ids),
            logprobs=output.response_logprobs,
            writer=lambda token: writer_of(turns, len(output.prompt_ids), token),
        )
        flaws += found
        return self.usable(found)

    def _misplaced(self, key: str, output: Any) -> list[Flaw]:
        """Compare the pictures of a response with the tokens that stand for one."""
        shown = {name: len(found or ()) for name, found in (output.multi_modal_data or {}).items()}
        found = misplaced(self._media, [*output.prompt_ids, *output.response_ids], shown)
        return [Flaw(UNUSABLE_PROMPT, f"the text of response {key} {why}") for why in found]


def unusable_prompt(error: Exception) -> Flaw:
    why = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Flaw(UNUSABLE_PROMPT, f"the prompt cannot be shown to the model: {why}"[:300])


def flaws_together(
    expected: int, flaws: Sequence[Sequence[Flaw]], sound: Sequence[Mapping[str, Any]]
) -> list[Flaw]:
    """Return the flaws of a group, of each and of all. `sound`: what verl stores of sound responses."""
    sessions = {int(fields["session_id"]) for fields in sound} | {i for i, found in enumerate(flaws) if found}
    return [flaw for found in flaws for flaw in found] + flaws_of_group(
        expected=expected,
        present=len(sessions),
        unmasked=[int(fields["response_mask"].sum()) for fields in sound],
        unscored=[why for fields in sound if (why := unscored(reward_info_of(fields)))],
    )


class Scores(ScoreRule):
    """The scores of verl's outputs of agent loops."""

    def failed(self, error: RayTaskError) -> Score:
        """Return the score of a response for which the call failed. Raises the error if it ends the run."""
        if self.ends_run:
            raise error
        cause = cause_of(error)
        why = f"raised: {type(cause).__name__}: {cause}".splitlines()[0]
        return Score(None, without_secrets(why)[:500])

    def settle(self, output: Any, failed: Score | None = None) -> None:
        """Make an output what is stored of its score. `failed`: set if the call failed.

        Raises RewardError if it has no score and that should end the run.
        """
        info = output.extra_fields.get("reward_extra_info") or {}
        output.reward_score, info = self.row(failed or Score.of(output.reward_score), info)
        if not self.ends_run:
            output.extra_fields["reward_extra_info"] = info
