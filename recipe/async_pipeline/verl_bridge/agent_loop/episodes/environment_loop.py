# SPDX-License-Identifier: Apache-2.0
"""The agent loop `environment`: the policy and an environment answer each other until the episode ends.

    row ─► prompt + first observation ─► policy: a turn ─► environment: step ─► observation ─► policy ...
                                             └─ cut off        └─ over, invalid     └─ no room, no turns left

Token-exact: what the policy wrote is never encoded again. verl's Continuous Token builders append each
observation to the tokens so far, with placeholders for its pictures; only the policy's own tokens have the
mask 1. The score is the sum of the rewards; each reward is in `turn_scores`, and with `agentic.turn_rewards`
at the last token of its turn.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakKeyDictionary

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from ....agents.env_hosts import EnvironmentPool, Game, PoolLimits
from ....agents.environment import EnvironmentSpec, Observation, Step
from ....agents.episodes import DONE
from ....errors import ConfigError, EnvironmentFailed
from ....gateway.conversation import Message
from ...launch.run_config import knobs_of
from ..prompt_pictures import decoded, has_media, require_vision
from ..tokens.prompt_tokens import tokens_of, turn_ends
from .episode import END, NOTED, WHY, current_attempt, place_of

NAME = "environment"
Content = str | list[dict[str, Any]]
"""Of a message: a text, or its parts."""


class EnvironmentSetup(NamedTuple):
    """What all episodes of a worker process share."""

    pool: EnvironmentPool
    max_turns: int
    max_turn_tokens: int | None
    response_length: int
    seed: int
    """Of rows without one; rows have the same seed in each epoch."""
    turn_rewards: bool = False


_setups: WeakKeyDictionary[asyncio.AbstractEventLoop, EnvironmentSetup] = WeakKeyDictionary()


def setup_of(config: DictConfig) -> EnvironmentSetup:
    """Return the setup of this process, made for its first episode."""
    loop = asyncio.get_running_loop()
    found = _setups.get(loop)
    if found is None:
        knobs = knobs_of(config).agentic
        if knobs.environment is None:
            raise ConfigError(f"the agent loop {NAME} requires {knobs.PATH}.environment; set it")
        spec = EnvironmentSpec(name=knobs.environment, kwargs=dict(knobs.environment_kwargs or {}))
        limits = PoolLimits(
            isolation=knobs.isolation,
            concurrency=knobs.concurrency,
            timeout_s=knobs.env_timeout_s,
        )
        rollout = config.actor_rollout_ref.rollout
        seed = OmegaConf.select(config, "data.seed") or 0
        found = EnvironmentSetup(
            EnvironmentPool(spec, limits),
            knobs.max_turns,
            knobs.max_turn_tokens,
            int(rollout.response_length),
            int(seed),
            knobs.turn_rewards,
        )
        _setups[loop] = found
    return found


async def stop() -> None:
    """End the environments of this process that play no episode."""
    found = _setups.pop(asyncio.get_running_loop(), None)
    if found is not None:
        await found.pool.close()


class RewardedTurns(AgentLoopOutput):  # type: ignore[misc]
    """A response whose rewards are at the last tokens of its turns, unless something else gave the score."""

    turn_rewards: list[tuple[int, float]]
    """Position in the response, and reward."""

    def as_dict(self) -> dict[str, Any]:
        """Return what verl stores."""
        fields: dict[str, Any] = super().as_dict()
        rewards = fields.pop("turn_rewards")
        if self.reward_score == sum(reward for _, reward in rewards):
            scores = fields["rm_scores"] = torch.zeros_like(fields["rm_scores"])
            for place, reward in rewards:
                scores[place] += reward
        return fields


class EnvironmentEpisode:
    """The tokens and rewards of one episode so far."""

    def __init__(self, messages: list[Message], prompt_ids: list[int], pictures: list[Any]) -> None:
        self.messages, self.token_ids, self.pictures = messages, prompt_ids, pictures
        self.mask: list[int] = []
        self.log_probs: list[float] | None = None
        self.rewards: list[float] = []
        self.rewarded: list[int] = []
        """The last token of the policy before each reward, by its position in the response."""
        self.turns = 0
        self.extra_fields: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {"generate_sequences": 0.0, "tool_calls": 0.0, "num_preempted": -1}
        self.end, self.why = DONE, ""

    def add_reward(self, reward: float) -> None:
        """Take the reward of the turn that was written last."""
        self.rewards.append(reward)
        self.rewarded.append(len(self.mask) - 1 - self.mask[::-1].index(1))

    def output(self, length: int, *, turn_rewards: bool = False) -> AgentLoopOutput:
        """Return it for verl. The response has at least one token."""
        start = len(self.token_ids) - len(self.mask)
        told = {"turn_scores": self.rewards, "tool_rewards": [], "reward_extra_info": {}}
        rewarded = [*zip(self.rewarded, self.rewards, strict=True)]
        made = partial(RewardedTurns, turn_rewards=rewarded) if turn_rewards else AgentLoopOutput
        return made(
            prompt_ids=self.token_ids[:start],
            response_ids=self.token_ids[start:][:length],
            response_mask=self.mask[:length],
            response_logprobs=None if self.log_probs is None else self.log_probs[:length],
            multi_modal_data={"images": self.pictures} if self.pictures else None,
            reward_score=float(sum(self.rewards)),
            num_turns=2 * self.turns,
            metrics=self.metrics,
            extra_fields={**self.extra_fields, **told, END: self.end, WHY: self.why},
        )


@register(NAME)
class EnvironmentLoop(AgentLoopBase):  # type: ignore[misc]
    """Plays one episode."""

    def setup(self) -> EnvironmentSetup:
        """Return what it shares with the other episodes of its process."""
        return setup_of(self.config)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Return the episode as one response.

        Raises EnvironmentFailed if the environment fails before the policy has written anything.
        """
        setup = self.setup()
        info = plain(row.get("extra_info") or {})
        playing = setup.pool.episode(seed_of(info, place_of(row), setup.seed), info.get("task") or {})

        attempt = current_attempt()
        async with AsyncExitStack() as stack:
            # The wait for an environment is not the episode's, and its reset has a deadline.
            with nullcontext() if attempt is None else attempt.excused():
                game = await stack.enter_async_context(playing)
            messages = with_observation(list(row["raw_prompt"]), content_of(game.observation, "reset"))
            pictures = await self._pictures(messages)
            token_ids = await self.ct_build_initial_tokens(messages, images=pictures or None)
            episode = EnvironmentEpisode(messages, token_ids, pictures)
            if not episode.token_ids:
                raise EnvironmentFailed("reset: neither the prompt nor the first observation has a text")
            await self._play(episode, game, sampling_params, setup)
        output = episode.output(setup.response_length, turn_rewards=setup.turn_rewards)
        if left := setup.pool.newly_left():
            output.extra_fields[NOTED] = {"left_behind": left}
        return output

    async def _play(
        self,
        episode: EnvironmentEpisode,
        game: Game,
        sampling_params: dict[str, Any],
        setup: EnvironmentSetup,
    ) -> None:
        request = uuid4().hex
        while True:
            said = await self._turn(episode, request, sampling_params, setup)
            if not self._is_whole(said, sampling_params):
                episode.end = "cut_off"
                return

            text = self.tokenizer.decode(said, skip_special_tokens=True)
            try:
                step = await _timed(episode, game, text)
            except EnvironmentFailed as error:
                episode.end, episode.why = "env_failed", str(error)
                return
            episode.add_reward(step.reward)
            if step.over:
                episode.end = "invalid" if step.invalid else DONE
                return
            if episode.turns >= setup.max_turns:
                episode.end = "turns"
                return
            try:
                content = content_of(step.observation, "step")
            except EnvironmentFailed as error:
                episode.end, episode.why = "env_failed", str(error)
                return
            if not await self._observe(episode, text, content, setup.response_length):
                episode.end = "tokens"
                return

    async def _turn(
        self,
        episode: EnvironmentEpisode,
        request: str,
        sampling_params: dict[str, Any],
        setup: EnvironmentSetup,
    ) -> list[int]:
        """Have the policy write a turn, and return its tokens."""
        room = setup.response_length - len(episode.mask)
        limit = min(room, sampling_params.get("max_tokens") or room, setup.max_turn_tokens or room)
        started = time.perf_counter()
        output = await self.server_manager.generate(
            request_id=request,
            prompt_ids=episode.token_ids,
            sampling_params={**sampling_params, "max_tokens": limit},
            image_data=episode.pictures or None,
        )
        episode.metrics["generate_sequences"] += time.perf_counter() - started
        self._note_versions(episode, output.extra_fields)
        episode.turns += 1

        known = episode.log_probs if episode.turns > 1 else ([] if output.log_probs else None)
        merged, episode.mask, episode.log_probs = await self.ct_merge_assistant_token(
            episode.token_ids,
            output.token_ids,
            episode.mask,
            known,
            assistant_logprobs=output.log_probs if known is not None else None,
        )
        episode.token_ids = merged.token_ids
        return list(output.token_ids)

    def _note_versions(self, episode: EnvironmentEpisode, said: Mapping[str, Any]) -> None:
        if not episode.extra_fields:
            episode.extra_fields.update(said)
        elif said.get("max_global_steps") is not None:
            episode.extra_fields["max_global_steps"] = said["max_global_steps"]

    async def _observe(self, episode: EnvironmentEpisode, text: str, content: Content, length: int) -> bool:
        """Append an observation; returns False, and appends nothing, if no turn fits after it."""
        said = [*episode.messages, {"role": "assistant", "content": text}]
        new = await self._pictures([{"role": "user", "content": content}])
        seen = {"role": "user", "content": with_pictures(content, new)}
        pictures = [*episode.pictures, *new]
        limit = self.rollout_config.get("limit_images")
        if limit and len(pictures) > limit:
            episode.why = f"it has {len(pictures)} pictures, and rollout.limit_images is {limit}"
            return False
        merged, mask, log_probs = await self.ct_merge_context_msg(
            said, [*said, seen], episode.token_ids, episode.mask, episode.log_probs
        )
        if len(mask) >= length:
            return False
        episode.messages, episode.token_ids, episode.pictures = [*said, seen], merged.token_ids, pictures
        episode.mask, episode.log_probs = mask, log_probs
        return True

    async def _pictures(self, messages: list[Message]) -> list[Any]:
        """Return the pictures of messages in the size in which the model sees them.

        Raises as `require_vision`.
        """
        if not has_media(messages):
            return []
        require_vision(self)
        return list((await self.process_multi_modal_info(messages))["images"])

    def _is_whole(self, said: list[int], sampling_params: Mapping[str, Any]) -> bool:
        """Return whether the policy ended the turn itself."""
        ends = turn_ends(tokens_of(self.config, self.tokenizer), sampling_params)
        return bool(said) and said[-1] in ends


async def _timed(episode: EnvironmentEpisode, game: Game, text: str) -> Step:
    started = time.perf_counter()
    try:
        return await game.step(text)
    finally:
        episode.metrics["tool_calls"] += time.perf_counter() - started


def content_of(observation: Observation, call: str) -> Content:
    """Return an observation as the content of a message.

    Raises EnvironmentFailed, with the name of the call, if a picture cannot be decoded.
    """
    if isinstance(observation, str):
        return observation
    parts: list[dict[str, Any]] = []
    for one in observation:
        if isinstance(one, str):
            parts.append({"type": "text", "text": one})
            continue
        try:
            parts.append({"type": "image", "image": decoded(one)})
        except Exception as error:  # Pillow raises many kinds for a damaged file
            why = f"{call}: a picture of the observation cannot be decoded: {type(error).__name__}: {error}"
            raise EnvironmentFailed(why) from error
    return parts


def with_pictures(content: Content, pictures: Sequence[Any]) -> Content:
    """Return a content with its pictures replaced."""
    if isinstance(content, str):
        return content
    left = iter(pictures)
    return [{**part, "image": next(left)} if part["type"] == "image" else part for part in content]


def with_observation(prompt: list[Message], observation: Content) -> list[Message]:
    """Return the messages of a prompt with the first observation in its last message of the user."""
    if not prompt or prompt[-1]["role"] != "user":
        return [*prompt, {"role": "user", "content": observation}]
    asked = prompt[-1]["content"]
    if isinstance(asked, str) and isinstance(observation, str):
        joined: Content = "\n\n".join(text for text in (asked, observation) if text)
    else:
        joined = [*_as_parts(asked), *_as_parts(observation)]
    return [*prompt[:-1], {**prompt[-1], "content": joined}]


def _as_parts(content: Content) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


def seed_of(info: Mapping[str, Any], place: Any, run_seed: int) -> int:
    """Return the seed of a row: its own `extra_info.seed`, or one that follows from its place."""
    if info.get("seed") is not None:
        return int(info["seed"])
    digest = hashlib.sha256(f"{run_seed} {place}".encode()).digest()
    # gymnasium takes seeds of 32 bits.
    return int.from_bytes(digest[:4], "big")


def plain(value: Any) -> Any:
    """Return a value of a row with Python's types instead of numpy's, as JSON requires."""
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value
