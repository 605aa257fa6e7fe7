# SPDX-License-Identifier: Apache-2.0
"""The agent loop of every arm of a benchmark: responses with tool calls in between, with spans."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from itertools import count
from typing import Any
from uuid import uuid4

import msgspec
from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput

from ..inputs.workload import EpisodeWorkload
from ..measuring.spans import of_this_job

NAME = "bench_episode"
_begun: defaultdict[int, count[int]] = defaultdict(count)
"""Number of responses to a prompt that this process has begun."""
OBSERVATION = "\n"
"""Output of a tool: the next response begins on a new line."""


class EpisodeLoop(AgentLoopBase):
    """Generates `turns` responses and awaits the latency of a tool after each but the last."""

    def __init__(self, *args: Any, episode: DictConfig, seed: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._episode = msgspec.convert(OmegaConf.to_container(episode), EpisodeWorkload)
        self._seed = seed
        self._observation = _observation(self.tokenizer)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Generate one trajectory; the loss mask excludes the output of the tool."""
        prompt, session = int(kwargs["index"]), session_of(kwargs)
        started = time.monotonic()

        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        request = uuid4().hex
        tokens: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        versions: list[int] = []

        for turn in range(self._episode.turns):
            if turn:
                await self._call_tool(prompt, session, turn)
                tokens += self._observation
                mask += [0] * len(self._observation)
                log_probs += [0.0] * len(self._observation)

            params = sampling_params | self._limit(prompt, session, turn)
            with of_this_job().measure("generate"):
                output = await self.server_manager.generate(
                    request_id=request, prompt_ids=prompt_ids + tokens, sampling_params=params
                )
            tokens += output.token_ids
            mask += [1] * len(output.token_ids)
            log_probs += output.log_probs or [0.0] * len(output.token_ids)
            versions += versions_in(output.extra_fields)

        of_this_job().add("episode", started, prompt=prompt)
        length = self.rollout_config.response_length
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=tokens[:length],
            response_mask=mask[:length],
            response_logprobs=log_probs[:length],
            num_turns=2 * self._episode.turns,
            metrics={"num_preempted": -1},
            extra_fields={
                "min_global_steps": min(versions),
                "max_global_steps": max(versions),
                # verl passes this to the reward function, within `extra_info`.
                "session": session,
                "turn_scores": [],
                "tool_rewards": [],
            },
        )

    async def _call_tool(self, prompt: int, session: int, turn: int) -> None:
        assert self._episode.tool_s is not None, "checked when the workload was read"
        with of_this_job().measure("tool"):
            await asyncio.sleep(self._episode.tool_s.draw(self._seed, "tool", prompt, session, turn))

    def _limit(self, prompt: int, session: int, turn: int) -> dict[str, Any]:
        """Return the sampling limits of a response: its length if the workload draws one, else a cap."""
        turns = self._episode.turns
        room = (self.rollout_config.response_length - (turns - 1) * len(self._observation)) // turns
        lengths = self._episode.answer_tokens
        if lengths is None:
            return {"max_tokens": room}
        drawn = round(lengths.draw(self._seed, "tokens", prompt, session, turn))
        return {"max_tokens": max(1, min(room, drawn)), "ignore_eos": True}


@cache
def _observation(tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer.encode(OBSERVATION, add_special_tokens=False)
    return ids


def session_of(row: Mapping[str, Any]) -> int:
    """Return the number of a response among those to its prompt; call it once for each response."""
    # verl's oldest agent loop does not number the responses to a prompt, but begins them in order.
    return int(row["session_id"]) if "session_id" in row else next(_begun[int(row["index"])])


def versions_in(extra: Mapping[str, Any]) -> list[int]:
    """Return the versions in a response; verl's plain client reports only the version at its end."""
    at_end = extra.get("global_steps")
    found = [extra.get("min_global_steps", at_end), extra.get("max_global_steps", at_end)]
    return [int(version) for version in found if version is not None]
