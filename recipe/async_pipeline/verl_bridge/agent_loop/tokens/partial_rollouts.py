# SPDX-License-Identifier: Apache-2.0
"""What was generated so far for a response, so that another process can continue it.

An agent loop requests tokens, calls tools, and requests tokens again. Each of its requests is recorded with
its output; for the open request, what the engine has generated so far. To resume the response, the agent loop
runs from its beginning: a request whose prompt was recorded gets the same tokens at once; the request that
was open continues from its tokens. If a prompt differs, because a tool returned something else, the response
is generated from there.

An agent loop worker writes the requests of its prompts into a shard of a checkpoint, and reads some shards
when a run resumes; the requests never pass through the trainer.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from verl.workers.rollout.replica import TokenOutput

from ....checkpoint import store, tensor_tree
from ....checkpoint.hashed_file import FileEntry
from ....core.groups.items import TokenSpan, pairs_of, spans_of
from ....core.waits.deadline import within
from ....observe.causes import one_line

logger = logging.getLogger(__name__)
_KINDS = {"i": "q", "f": "d"}
"""Types of arrays, by the kind of numbers."""
WRITTEN_S = 20.0
"""Seconds that a server gets to report what it has generated, which it does after a load in progress. A
timeout only costs repeated work.
"""


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

    def packed(self) -> RecordedRequest:
        """Return it with arrays, which take 8 bytes for a number instead of 32 and no time to write.

        What is not a list of numbers stays as it is.
        """
        log_probs = None if self.log_probs is None else as_array("d", self.log_probs)
        return self._replace(
            prompt_ids=as_array("q", self.prompt_ids),
            token_ids=as_array("q", self.token_ids),
            log_probs=log_probs,
        )

    def with_more(self, written: RecordedRequest) -> RecordedRequest:
        """Return it with what was generated after it. What is unknown of a part is unknown of the result."""
        said = len(self.token_ids)
        known = self.log_probs is not None and written.log_probs is not None
        return self._replace(
            token_ids=[*self.token_ids, *written.token_ids],
            log_probs=[*(self.log_probs or ()), *(written.log_probs or ())] if known else None,
            spans=[*self.spans, *(TokenSpan(version, said + at) for version, at in written.spans)],
            stop_reason=written.stop_reason,
        )

    def until(self, version: int) -> RecordedRequest | None:
        """Return it without what newer versions have generated, or None if nothing is left."""
        end = next((span.start for span in self.spans if span.version > version), None)
        if end is None:
            return self
        return (
            self._replace(
                token_ids=self.token_ids[:end],
                log_probs=None if self.log_probs is None else self.log_probs[:end],
                spans=[span for span in self.spans if span.start < end],
                stop_reason=None,
            )
            if end
            else None
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
        now = RecordedRequest((), output.token_ids, output.log_probs, spans, output.stop_reason)
        whole = self.with_more(now).output()
        fields = {**output.extra_fields, **whole.extra_fields, "replica": output.extra_fields.get("replica")}
        return output.model_copy(
            update={"token_ids": whole.token_ids, "log_probs": whole.log_probs, "extra_fields": fields}
        )


class Open(NamedTuple):
    """A request that is being processed."""

    prompt_ids: Sequence[int]
    before: RecordedRequest | None
    """What an earlier process had generated for it."""
    where: Callable[[], tuple[Any, str] | None]
    """Returns the server and the request's name there; None if no server has it, or if another process
    cannot use a part of the response.
    """

    def with_written(self, written: RecordedRequest | None) -> RecordedRequest | None:
        """Return what was generated so far, or None if it is empty or its log-probs are unknown."""
        if written is None or not written.token_ids or not written.spans:
            return self.before
        if self.before is None:
            whole = written._replace(prompt_ids=self.prompt_ids)
        else:
            whole = self.before.with_more(written)
        return None if whole.log_probs is None else whole.packed()


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
            self.said.append(RecordedRequest(*said).packed())

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

    def noted(self, found: Mapping[str, RecordedRequest]) -> NotedResponse:
        """Note all requests as they are now, with what engines have generated for open ones. `found`: by the
        engine's name of the request.
        """
        # An agent loop may append to the prompt later.
        opened = [
            (
                one._replace(prompt_ids=list(one.prompt_ids)),
                None if (place := one.where()) is None else found.get(place[1]),
            )
            for one in self.open.values()
        ]
        return NotedResponse([*self.said], opened, [*self._before])


class NotedResponse(NamedTuple):
    """The requests of one response at a moment."""

    said: Sequence[RecordedRequest]
    opened: Sequence[tuple[Open, RecordedRequest | None]]
    before: Sequence[RecordedRequest]

    def together(self, version: int) -> list[RecordedRequest]:
        """Return all requests without what is newer than a version; copies open ones, so use a thread."""
        parts = [one.with_written(written) for one, written in self.opened]
        whole = (*self.said, *(part for part in parts if part is not None), *self.before)
        return [old for one in whole if (old := one.until(version)) is not None]


async def written_so_far(requests: Sequence[Open]) -> dict[str, RecordedRequest]:
    """Request from each server, once, what it has generated; returns it without prompts. A server that is
    gone or late has nothing, and a warning says so.
    """
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
    for some, answer in zip(names.values(), answers, strict=True):
        if isinstance(answer, BaseException):
            logger.warning("%d open requests are not kept: %s", len(some), one_line(answer))
    return {
        name: RecordedRequest((), tokens, log_probs, spans_of(spans), None)
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


def tokens_in(sessions: Sequence[Sequence[RecordedRequest]]) -> int:
    """Return the number of tokens of all responses to a prompt."""
    return sum(len(said.token_ids) for session in sessions for said in session)


def write(
    root: str, shard: str, noted: Mapping[str, Sequence[NotedResponse]], version: int
) -> list[FileEntry]:
    """Write the requests of prompts into a shard of a checkpoint; blocks. Returns its files.

    Training continues meanwhile: what versions after that of the checkpoint have generated is left out.
    """
    whole = {uid: [one.together(version) for one in responses] for uid, responses in noted.items()}
    return tensor_tree.write_shard(
        root, shard, as_plain({uid: one for uid, one in whole.items() if tokens_in(one)})
    )


def read(checkpoint: str, shards: Sequence[str]) -> dict[str, list[list[RecordedRequest]]]:
    """Read shards; blocks. Raises CheckpointError if they are damaged."""
    found: dict[str, list[list[RecordedRequest]]] = {}
    for shard in shards:
        found |= from_plain(tensor_tree.read(store.require_shard(Path(checkpoint), shard)))
    return found


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


def as_array(kind: str, numbers: Sequence[Any]) -> Sequence[Any]:
    """Return an array of numbers, or what it is given if that has something else."""
    try:
        return array(kind, numbers)
    except (TypeError, OverflowError):
        return numbers


def _plain(said: RecordedRequest) -> list[Any]:
    fields = said._asdict()
    return list({**fields, "spans": pairs_of(said.spans)}.values())


def _recorded(plain: Sequence[Any]) -> RecordedRequest:
    values: list[Any] = [
        array(_KINDS[one.dtype.kind], one.tobytes()) if isinstance(one, np.ndarray) else one for one in plain
    ]
    said = RecordedRequest(*values)
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
