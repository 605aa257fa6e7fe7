# SPDX-License-Identifier: Apache-2.0
"""The agent loop `diffusion`: a prompt becomes an image, whose SDE steps are the tokens of the response.

The noise of a sample follows from the run's seed and from the place of its prompt in the data, so that it
does not depend on batches, replicas or other samples. All samples of a prompt have one window of SDE steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import torch
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.workers.rollout.replica import TokenOutput

from ...config.paths import OWN
from ...diffusion.windows import seed_of
from ..rollout.diffusers.fields import CONDITION, CONDITIONS, HOLDER, IMAGE, LATENTS, PICTURE, WANTED
from ..workers.diffusion.diffusion_model import Denoising
from .episodes.episode import change_episode, current_episode, place_of
from .tokens.partial_rollouts import RecordingClient

NAME = "diffusion"
COLUMNS = "diffusion_columns"
"""Field of an output with the columns of its row: tensors by name."""
KEPT = "picture_kept"
"""Field of an output whose picture goes into the sample store: to be scored there, or to be shown."""


@register(NAME)
class DiffusionLoop(AgentLoopBase):  # type: ignore[misc]
    """Draws one image."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._windows = Denoising.of(self.config.actor_rollout_ref.model.denoising).windows()
        self._seed = int(OmegaConf.select(self.config, "data.seed") or 0)
        self._scored_later = OmegaConf.select(self.config, f"{OWN}.reward.while_generating") is False

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> AgentLoopOutput:
        """Return the image, with the columns that a training step needs of it."""
        prompt = prompt_of(row["raw_prompt"])
        prompt_ids = self._cap_text_prompt_length(self.tokenizer(prompt)["input_ids"])
        started = time.perf_counter()
        output: TokenOutput = await self._client.generate(
            request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=self._sampling(prompt, row)
        )
        seconds = time.perf_counter() - started

        fields = output.extra_fields
        # A copy, because arrays that Ray unpacks are read-only.
        columns = {LATENTS: torch.tensor(fields.pop(LATENTS)), **_columns(fields.pop(CONDITIONS, {}))}
        # verl needs a token; a sample of validation has no SDE step, and is not trained.
        steps, log_probs = output.token_ids or [0], output.log_probs or [0.0]
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=steps,
            response_mask=[1] * len(steps),
            response_logprobs=log_probs,
            num_turns=2,
            metrics={"generate_sequences": seconds, "tool_calls": 0.0, "num_preempted": -1},
            extra_fields={
                **fields,
                **({COLUMNS: columns} if output.token_ids else {}),
                **({KEPT: True} if output.token_ids and self._keeps(row) else {}),
                "turn_scores": [],
                "tool_rewards": [],
            },
        )

    @property
    def _client(self) -> Any:
        """Return the client without a transcript: of an image, its tokens alone continue nothing."""
        client = self.server_manager
        return client.inner if isinstance(client, RecordingClient) else client

    def _keeps(self, row: Mapping[str, Any]) -> bool:
        """Return whether a picture goes into the sample store; of each prompt, the first one is shown."""
        return self._scored_later or int(row["session_id"]) == 0

    def _sampling(self, prompt: str, row: Mapping[str, Any]) -> dict[str, Any]:
        place = (self._seed, int(row["global_steps"]), place_of(row))
        trained = not current_episode().validates
        window = self._windows.of(seed_of("window", *place), place[1]) if trained else None
        kind = "train" if trained else "val"
        session = int(row["session_id"])
        return {
            "prompt": prompt,
            WANTED: (IMAGE, CONDITIONS) if trained and session == 0 else (IMAGE,),
            "seed": seed_of(kind, *place, session),
            "window": None if window is None else [window.start, window.size],
        }


def take_columns(outputs: Sequence[Any]) -> None:
    """Take the columns out of verl's outputs, which have only one column for everything else."""
    change_episode(columns=[one.extra_fields.pop(COLUMNS, {}) for one in outputs])


def add_columns(fields: Sequence[dict[str, Any]]) -> None:
    """Add to each row of the sample store what `take_columns` took; leave pictures out that nothing reads."""
    for values, more in zip(fields, current_episode().columns, strict=False):
        values.update(more)
        extra = values.get("extra_fields") or {}
        if not extra.pop(KEPT, False):
            extra.pop(PICTURE, None)


async def share_conditions(
    client: Any, prompt: Mapping[str, Any], rows: Mapping[str, dict[str, Any]]
) -> None:
    """Have one row of a group hold the conditions of its prompt, and all rows name it. `rows` by key.

    The response that was to bring them may not be in the group; then another request does.
    """
    names = {name for fields in rows.values() for name in fields if name.startswith(CONDITION)}
    holder = next((key for key, fields in rows.items() if names & fields.keys()), next(iter(rows)))
    if not names:
        text = prompt_of(prompt["raw_prompt"])
        asked = {"prompt": text, WANTED: (CONDITIONS,)}
        output = await client.generate(request_id=uuid4().hex, prompt_ids=[], sampling_params=asked)
        rows[holder].update(_columns(output.extra_fields[CONDITIONS]))
    found = {name: one for name, one in rows[holder].items() if name.startswith(CONDITION)}
    for key, fields in rows.items():
        if key != holder:
            fields.update({name: one[:0] for name, one in found.items()})
        fields[HOLDER] = holder


def _columns(conditions: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{CONDITION}{name}": one for name, one in conditions.items()}


def prompt_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that the encoders read: of all messages, in one line each."""
    return "\n".join(str(message["content"]) for message in messages)
