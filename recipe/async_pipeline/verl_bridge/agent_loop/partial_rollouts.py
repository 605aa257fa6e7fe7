# SPDX-License-Identifier: Apache-2.0
"""What was generated so far for a response, so that another process can continue it.

An agent loop requests tokens, calls tools, and requests tokens again. Each of its requests is recorded with
its output; for the open request, what the engine has generated so far. To resume the response, the agent loop
runs from its beginning: a request whose prompt was recorded gets the same tokens at once; the request that
was open continues from its tokens. If a prompt differs, because a tool returned something else, the response
is generated from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from verl.workers.rollout.replica import TokenOutput

from ...core.deadline import within
from ...core.items import Prompt
from ...core.token_spans import TokenSpan, pairs_of, spans_of

WRITTEN_S = 5.0
"""Seconds that a server gets to report what it has generated. A timeout only costs repeated work."""


class RecordedRequest(NamedTuple):
    """A request with its output."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    log_probs: Sequence[float] | None
    spans: Sequence[TokenSpan]
    """Positions count from the first token of this request."""
    stop_reason: str | None
    """None if it was not finished."""
    replica: str = ""
    """The replica that generated it."""

    @property
    def finished(self) -> bool:
        return self.stop_reason is not None

    def with_more(self, written: WrittenSoFar, stop_reason: str | None) -> RecordedRequest:
        """Return it with what was generated after it. What is unknown of a part is unknown of the
        result.
        """
        said = len(self.token_ids)
        known = self.log_probs is not None and written.log_probs is not None
        return self._replace(
            token_ids=[*self.token_ids, *written.token_ids],
            log_probs=[*(self.log_probs or ()), *(written.log_probs or ())] if known else None,
            spans=[*self.spans, *(TokenSpan(version, said + at) for version, at in written.spans)],
            stop_reason=stop_reason,
        )

    def output(self) -> TokenOutput:
        """Return it as verl's client returns an output."""
        versions = [span.version for span in self.spans]
        stamps = {
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            "global_steps": versions[-1],
        }
        return TokenOutput(
            token_ids=list(self.token_ids),
            log_probs=None if self.log_probs is None else list(self.log_probs),
            stop_reason=self.stop_reason,
            extra_fields={**stamps, "version_spans": pairs_of(self.spans), "replica": self.replica},
        )

    def joined(self, output: TokenOutput) -> TokenOutput:
        """Return what was generated before, followed by `output`."""
        spans = spans_of(output.extra_fields.get("version_spans") or ())
        now = WrittenSoFar(output.token_ids, output.log_probs, spans)
        whole = self.with_more(now, output.stop_reason).output()
        fields = {**output.extra_fields, **whole.extra_fields, "replica": output.extra_fields.get("replica")}
        return output.model_copy(
            update={"token_ids": whole.token_ids, "log_probs": whole.log_probs, "extra_fields": fields}
        )


class WrittenSoFar(NamedTuple):
    """What an engine has generated for an open request."""

    token_ids: Sequence[int]
    log_probs: Sequence[float] | None
    spans: Sequence[TokenSpan]


class Open(NamedTuple):
    """A request that is being processed."""

    prompt_ids: Sequence[int]
    before: RecordedRequest | None
    """What an earlier process had generated for it."""
    where: Callable[[], tuple[Any, str] | None]
    """Returns the server and the request's name there; None if no server has it, or if another process
    cannot use a part of the response.
    """

    def with_written(self, written: WrittenSoFar | None) -> RecordedRequest | None:
        """Return what was generated so far, or None if it is empty or its log-probs are unknown."""
        if written is None or not written.token_ids or not written.spans:
            return self.before
        before = self.before or RecordedRequest(list(self.prompt_ids), [], [], [], None)
        whole = before.with_more(written, None)
        return None if whole.log_probs is None else whole


class Transcript:
    """The recorded requests of one response."""

    def __init__(self, before: Sequence[RecordedRequest] = ()) -> None:
        """`before`: requests of an earlier process."""
        self._before = list(before)
        self.said: list[RecordedRequest] = []
        self.open: dict[str, Open] = {}
        """Open requests by id."""
        self.replayed = 0
        """Requests that had an output of an earlier process, or a part of one."""

    def keep(self, prompt_ids: Sequence[int], output: TokenOutput) -> None:
        """Record the output of a request, unless it cannot be repeated from numbers alone."""
        spans, stopped = output.extra_fields.get("version_spans"), output.stop_reason or "completed"
        if spans and output.routed_experts is None and stopped != "aborted":
            replica = str(output.extra_fields.get("replica") or "")
            said = (list(prompt_ids), output.token_ids, output.log_probs, spans_of(spans), stopped, replica)
            self.said.append(RecordedRequest(*said))

    def recall(self, prompt_ids: Sequence[int]) -> RecordedRequest | None:
        """Return the recorded request with this prompt, once; None if there was no such request."""
        for place, said in enumerate(self._before):
            if list(said.prompt_ids) == list(prompt_ids):
                self.replayed += 1
                return self._before.pop(place)
        return None

    def forget(self) -> None:
        """Forget all requests: the response is generated again from its beginning."""
        self._before, self.said = [], []

    def with_open(self, found: Mapping[str, WrittenSoFar]) -> list[RecordedRequest]:
        """Return all requests, with what engines have generated for open ones. `found`: by the
        engine's name of the request.
        """
        parts = (
            one.with_written(None if (place := one.where()) is None else found.get(place[1]))
            for one in self.open.values()
        )
        return [*self.said, *(part for part in parts if part is not None), *self._before]


async def written_so_far(requests: Sequence[Open]) -> dict[str, WrittenSoFar]:
    """Request from each server, once, what it has generated. A server that is gone or late has nothing."""
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
            what="a server to report what it has written",
        )
        for server, some in names.items()
    ]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    return {
        name: WrittenSoFar(tokens, log_probs, spans_of(spans))
        for answer in answers
        if isinstance(answer, dict)
        for name, (tokens, log_probs, spans) in answer.items()
    }


class RecordingClient:
    """The LLM client of one response: passes that response's transcript along with each request.

    verl gives an agent loop its client, and nothing else reaches from the loop to the request.
    """

    def __init__(self, client: Any, transcript: Transcript) -> None:
        self._client, self._transcript = client, transcript

    @property
    def inner(self) -> Any:
        """Return the client that keeps no transcript."""
        return self._client

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        """Return the output of the request; see `PipelineLLMClient.generate`."""
        output: TokenOutput = await self._client.generate(request_id, transcript=self._transcript, **kwargs)
        return output

    def __getattr__(self, name: str) -> Any:
        """Delegate to the client, except while a copy of this object is being built."""
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
    return replace(prompt, kept_tokens=tokens, payload={**prompt.payload, COLUMN: list(responses)})


def without_resumed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the payload of a prompt without what an earlier process generated for it."""
    return {name: value for name, value in row.items() if name != COLUMN}


def resumed_in(row: Mapping[str, Any]) -> list[list[RecordedRequest]]:
    """Return what an earlier process generated for a prompt, response by response; empty if it did not."""
    return list(row.get(COLUMN, ()))


def tokens_in(sessions: Sequence[Sequence[RecordedRequest]]) -> int:
    """Return the number of tokens of all responses to a prompt."""
    return sum(len(said.token_ids) for session in sessions for said in session)


def as_plain(transcripts: Mapping[str, Sequence[Sequence[RecordedRequest]]]) -> dict[str, Any]:
    """Convert for a file: lists of numbers by prompt, response, request."""
    return {
        uid: [[_plain(said) for said in session] for session in sessions]
        for uid, sessions in transcripts.items()
    }


def from_plain(plain: Mapping[str, Any]) -> dict[str, list[list[RecordedRequest]]]:
    """Convert back what `as_plain` returned."""
    return {
        uid: [[_recorded(said) for said in session] for session in sessions]
        for uid, sessions in plain.items()
    }


def _plain(said: RecordedRequest) -> list[Any]:
    fields = said._asdict()
    return list({**fields, "spans": pairs_of(said.spans)}.values())


def _recorded(plain: Sequence[Any]) -> RecordedRequest:
    said = RecordedRequest(*plain)
    return said._replace(spans=spans_of(said.spans))


def continued(
    params: Mapping[str, Any], said: RecordedRequest, prompt_length: int, response_length: int
) -> dict[str, Any] | None:
    """Return the sampling parameters of the rest of a request, with the limit that verl's server would
    apply; None if no token is left.
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


def sampling_of(rollout: Any) -> dict[str, Any]:
    """Return the sampling parameters that verl's `generate_sequences` uses for training."""
    return {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "repetition_penalty": 1.0,
        "logprobs": rollout.calculate_log_probs,
    }
