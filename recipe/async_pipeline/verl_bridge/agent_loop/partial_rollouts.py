# SPDX-License-Identifier: Apache-2.0
"""What an answer that is being written has been told by the engines, so that another process can go on with
it.

An agent loop asks for tokens, calls tools, and asks again. Each of its requests is kept with what was
answered; of the
one that is open, what the engine has written so far. Who resumes the answer runs the agent loop anew: a
request whose
prompt is one that was answered gets the same tokens again, at once; the one that was open goes on from its
tokens. Where
a prompt is another one, because a tool said something else, the answer is written anew from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.replica import TokenOutput

from ...core.clock import within
from ...core.items import Prompt

WRITTEN_S = 5.0
"""What a server gets to say what it has written. Nothing depends on it but work that is done twice."""


class RecordedRequest(NamedTuple):
    """A request, with what was answered. None of the fields is a tuple or a tensor, so that it can be
    written as it is.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    log_probs: Sequence[float] | None
    spans: Sequence[Sequence[int]]
    """`(version, token of this request)`."""
    stop_reason: str | None
    """None: it was not finished."""
    replica: str = ""
    """Which one wrote it."""

    @property
    def finished(self) -> bool:
        return self.stop_reason is not None

    def with_more(self, written: Written, stop_reason: str | None) -> RecordedRequest:
        """With what was written after it. What is not known of a part is not known of the whole."""
        said = len(self.token_ids)
        known = self.log_probs is not None and written.log_probs is not None
        return self._replace(
            token_ids=[*self.token_ids, *written.token_ids],
            log_probs=[*(self.log_probs or ()), *(written.log_probs or ())] if known else None,
            spans=[*self.spans, *([int(version), said + int(at)] for version, at in written.spans)],
            stop_reason=stop_reason,
        )

    def output(self) -> TokenOutput:
        """As verl's client gives it."""
        versions = [int(version) for version, _ in self.spans]
        stamps = {
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            "global_steps": versions[-1],
        }
        spans = [list(span) for span in self.spans]
        return TokenOutput(
            token_ids=list(self.token_ids),
            log_probs=None if self.log_probs is None else list(self.log_probs),
            stop_reason=self.stop_reason,
            extra_fields={**stamps, "version_spans": spans, "replica": self.replica},
        )

    def joined(self, output: TokenOutput) -> TokenOutput:
        """What was written before, with what was written now behind it."""
        now = Written(output.token_ids, output.log_probs, output.extra_fields.get("version_spans") or ())
        whole = self.with_more(now, output.stop_reason).output()
        fields = {**output.extra_fields, **whole.extra_fields, "replica": output.extra_fields.get("replica")}
        return output.model_copy(
            update={"token_ids": whole.token_ids, "log_probs": whole.log_probs, "extra_fields": fields}
        )


class Written(NamedTuple):
    """What an engine has of a request that is open."""

    token_ids: Sequence[int]
    log_probs: Sequence[float] | None
    spans: Sequence[Sequence[int]]


class Open(NamedTuple):
    """A request that is being answered."""

    prompt_ids: Sequence[int]
    before: RecordedRequest | None
    """What an earlier process had of it."""
    where: Callable[[], tuple[Any, str] | None]
    """The server, and the request's name there."""

    def with_written(self, written: Written | None) -> RecordedRequest | None:
        """What there is of it so far; None: nothing, or not how likely its tokens were."""
        if written is None or not written.token_ids or not written.spans:
            return self.before
        before = self.before or RecordedRequest(list(self.prompt_ids), [], [], [], None)
        whole = before.with_more(written, None)
        return None if whole.log_probs is None else whole


class Transcript:
    """Of one answer."""

    def __init__(self, before: Sequence[RecordedRequest] = ()) -> None:
        """`before`: of an earlier process."""
        self._before = list(before)
        self.said: list[RecordedRequest] = []
        self.open: dict[str, Open] = {}
        """By the id of the request."""

    def keep(self, prompt_ids: Sequence[int], output: TokenOutput) -> None:
        """A request was answered. One that cannot be repeated from numbers alone is left out."""
        spans, stopped = output.extra_fields.get("version_spans"), output.stop_reason or "completed"
        if spans and output.routed_experts is None and stopped != "aborted":
            replica = str(output.extra_fields.get("replica") or "")
            self.said.append(
                RecordedRequest(list(prompt_ids), output.token_ids, output.log_probs, spans, stopped, replica)
            )

    def recall(self, prompt_ids: Sequence[int]) -> RecordedRequest | None:
        """What this prompt was answered before; told once."""
        for place, said in enumerate(self._before):
            if list(said.prompt_ids) == list(prompt_ids):
                return self._before.pop(place)
        return None

    def with_open(self, found: Mapping[str, Written]) -> list[RecordedRequest]:
        """All that there is. `found`: what engines have of requests, by the name that they have there."""
        parts = (
            one.with_written(None if (place := one.where()) is None else found.get(place[1]))
            for one in self.open.values()
        )
        return [*self.said, *(part for part in parts if part is not None), *self._before]


async def written_so_far(requests: Sequence[Open]) -> dict[str, Written]:
    """Ask the servers, each once. One that is gone, or does not answer in time, has nothing."""
    names: dict[Any, list[str]] = {}
    for one in requests:
        place = one.where()
        if place is not None and place[1]:
            names.setdefault(place[0], []).append(place[1])
    asked = [
        within(
            server.written.remote(some),
            WRITTEN_S,
            owner="an agent loop",
            what="a server to say what it has written",
        )
        for server, some in names.items()
    ]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    return {
        name: Written(*one) for answer in answers if isinstance(answer, dict) for name, one in answer.items()
    }


class RecordingClient:
    """The LLM client of one response: passes that response's transcript along with each request.

    verl gives an agent loop its client, and nothing else reaches from the loop to the request.
    """

    def __init__(self, client: Any, transcript: Transcript) -> None:
        self._client, self._transcript = client, transcript

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        """Return the output of the request; see `PipelineLLMClient.generate`."""
        output: TokenOutput = await self._client.generate(request_id, transcript=self._transcript, **kwargs)
        return output

    def __getattr__(self, name: str) -> Any:
        """Everything else is the client's, but a copy that is being built has none yet."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._client, name)


COLUMN = "resumed_responses"
"""Of a prompt's row: what an earlier process generated for it, response by response."""


def with_resumed(prompt: Prompt, responses: Sequence[Sequence[RecordedRequest]]) -> Prompt:
    """Return the prompt with what an earlier process generated for it in its payload."""
    tokens = tokens_in(responses)
    if not tokens:
        return prompt
    row = prompt.payload.copy()
    tu.assign_non_tensor_data(row, COLUMN, responses)
    return replace(prompt, kept_tokens=tokens, payload=row)


def without_resumed(row: TensorDict) -> TensorDict:
    """Return the payload of a prompt without what an earlier process generated for it."""
    return row.exclude(COLUMN) if COLUMN in row.keys() else row


def resumed_in(row: TensorDict) -> list[list[RecordedRequest]]:
    """Return what an earlier process generated for a prompt, response by response; empty if it did not."""
    return list(row[COLUMN]) if COLUMN in row.keys() else []


def tokens_in(sessions: Sequence[Sequence[RecordedRequest]]) -> int:
    """Tokens of all answers to a prompt."""
    return sum(len(said.token_ids) for session in sessions for said in session)


def as_plain(transcripts: Mapping[str, Sequence[Sequence[RecordedRequest]]]) -> dict[str, Any]:
    """For a file: lists of numbers. By prompt, answer, request."""
    return {
        uid: [[list(said) for said in session] for session in sessions]
        for uid, sessions in transcripts.items()
    }


def from_plain(plain: Mapping[str, Any]) -> dict[str, list[list[RecordedRequest]]]:
    """The way back."""
    return {
        uid: [[RecordedRequest(*said) for said in session] for session in sessions]
        for uid, sessions in plain.items()
    }


def continued(
    params: Mapping[str, Any], said: RecordedRequest, prompt_length: int, response_length: int
) -> dict[str, Any] | None:
    """Sampling parameters of what is left of a request, as verl's server would have limited it; None:
    nothing is.
    """
    limit = params.get("max_tokens", params.get("max_new_tokens"))
    if limit is None:
        limit = min(response_length, prompt_length + response_length - len(said.prompt_ids))
    left = int(limit) - len(said.token_ids)
    if left < 1:
        return None
    shortened = {
        name: value for name, value in params.items() if name not in ("max_tokens", "max_new_tokens")
    }
    if "min_tokens" in params:
        shortened["min_tokens"] = max(0, int(params["min_tokens"]) - len(said.token_ids))
    return {**shortened, "max_tokens": left}
