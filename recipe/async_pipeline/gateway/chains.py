# SPDX-License-Identifier: Apache-2.0
"""The conversations of a session as chains of tokens. Pure: no clock, no tokenizer, no engine.

    request: messages ──► the longest history that a chain already has ──► the tokens of that history,
                                                                           and what is new
        history is all of the chain    ► the chain grows
        history is a part of it, or    ► a new chain begins with these tokens; they are not trained there
        the chain is being answered
        no history in common           ► a new chain begins with the whole request, tokenized

A chain becomes one row of training. Its tokens are exactly what its last request sent to the engine and what
the engine answered: text is compared, but never encoded again. An answer is trained in one chain only, the
one that it was written for. An agent that edits, forgets or summarises its history, asks twice, or follows
several branches gets more chains, up to a limit, and no error.

The main conversation is the first chain and the chains that have something in common with it, but for
requests without tools if it has tools, unless the agent says more (`Ask.main`, `Ask.model`). Other chains are
auxiliary. The row of the main conversation that was answered last is the last one, which is scored.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from uuid import uuid4

from ..core.groups.items import TokenSpan
from ..errors import RequestRefused
from .conversation import (
    Message,
    RowReason,
    SentPicture,
    difference,
    identities,
    identity,
    pictures_of,
    shared,
)


class Completion(NamedTuple):
    """What the engine wrote for one request."""

    token_ids: Sequence[int]
    log_probs: Sequence[float] | None
    """Of each token; None if the run does not record them."""
    spans: Sequence[TokenSpan]
    """Positions count from the first token of the answer."""
    whole: bool = True
    """It ends with the token that ends a turn."""


class ChainRow(NamedTuple):
    """One chain for training."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    """1 for tokens of the response that the policy wrote in this chain."""
    log_probs: list[float] | None
    """Of the response; 0 where the mask is 0."""
    spans: list[TokenSpan]
    """Positions count from the first token of the response. At least one span for each answer."""
    answers: int
    pictures: Sequence[SentPicture] = ()
    """The ones that its tokens have placeholders for."""


class AnswerPlace(NamedTuple):
    """Where an answer is."""

    chain: str
    """`Chain.request_id`."""
    start: int


class Boundary(NamedTuple):
    """The end of an answer: here a chain can be continued, or another one begin."""

    messages: int | None
    """Messages up to here; None in a chain of requests that sent tokens."""
    tokens: int


@dataclass
class Chain:
    """One conversation."""

    tools: Hashable
    start: int
    """Tokens of the prompt, which precede the response."""
    request_id: str = field(default_factory=lambda: uuid4().hex)
    """Names its requests to the engines: all go to the replica that has its tokens cached."""
    messages: list[Message] = field(default_factory=list)
    identities: list[Hashable] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] | None = field(default_factory=list)
    spans: list[TokenSpan] = field(default_factory=list)
    """By position in `token_ids`."""
    boundaries: list[Boundary] = field(default_factory=list)
    main: bool = True
    """It belongs to the main conversation."""
    continued: int = 0
    """Tokens that a later request has sent, so that the agent has received them."""
    last_start: int = 0
    """Position of its last answer."""
    busy: bool = False
    """A request is being answered that will make it grow."""
    answers: int = 0
    last: int = 0
    """Number of its last answer in the session."""

    def grow(self, request: Sequence[int], kept: int, answer: Completion) -> None:
        """Append the rest of a request and its answer; the first `kept` tokens are the chain's own."""
        added, self.last_start = len(request) - kept, len(request)
        # In place: copies would take quadratic time in the turns of a long conversation.
        self.token_ids[kept:] = [*request[kept:], *answer.token_ids]
        self.mask[kept:] = [*[0] * added, *[1] * len(answer.token_ids)]
        if self.log_probs is not None and answer.log_probs is not None:
            self.log_probs[kept:] = [*[0.0] * added, *answer.log_probs]
        else:
            self.log_probs = None
        while self.spans and self.spans[-1].start >= kept:
            self.spans.pop()
        self.spans += [TokenSpan(version, len(request) + at) for version, at in answer.spans]
        while self.boundaries and self.boundaries[-1].tokens > kept:
            self.boundaries.pop()

    def received(self, lost: Collection[AnswerPlace]) -> Chain | None:
        """Return it without its last answer if that is lost; None if no other answer is its own."""
        if self.continued > self.last_start or AnswerPlace(self.request_id, self.last_start) not in lost:
            return self
        own = [at for at in range(self.last_start) if self.mask[at]]
        if not own:
            return None
        end = own[-1] + 1
        messages = max((one.messages or 0 for one in self.boundaries if one.tokens <= end), default=0)
        return replace(
            self,
            messages=self.messages[:messages],
            token_ids=self.token_ids[:end],
            mask=self.mask[:end],
            log_probs=None if self.log_probs is None else self.log_probs[:end],
            spans=[span for span in self.spans if span.start < end],
            answers=self.answers - 1,
        )

    def row(self, prompt_limit: int) -> ChainRow:
        """Return it for training. What the prompt has beyond the limit is part of the response, masked."""
        start = min(self.start, prompt_limit)
        return ChainRow(
            self.token_ids[:start],
            self.token_ids[start:],
            self.mask[start:],
            None if self.log_probs is None else self.log_probs[start:],
            [TokenSpan(version, at - start) for version, at in self.spans],
            self.answers,
            pictures_of(self.messages),
        )


class OpenRequest:
    """A request that is being answered. Ends with `commit` or `abandon`, and changes nothing before.

    `known`: tokens of the history that a chain has, empty without one; `previous`: messages of that history;
    `new`: messages that follow.
    """

    def __init__(
        self, chains: Chains, chain: Chain, *, grows: bool, known: list[int], previous: list[Message]
    ) -> None:
        self._chains, self.grows = chains, grows
        self.chain, self.known, self.previous = chain, known, previous
        self.main: bool | None = None
        """Whether its answer makes its chain a main one; None: as before."""
        self.why: RowReason = "branch"
        """Why it begins another chain, if it does."""
        self.new: list[Message] = []
        self.identities: list[Hashable] = []
        self.open = True

    def room(self, length: int, prompt_limit: int, response_limit: int) -> int:
        """Return how many tokens may be written after `length` tokens of the request."""
        start = self.chain.start if self.known else length
        return min(start, prompt_limit) + response_limit - length

    def commit(self, token_ids: list[int], kept: int, answer: Completion, said: Message | None) -> None:
        """Take the answer. `token_ids`: of the whole request, of which the first `kept` are from `known`.

        `said`: the answer as a message; None for a request that sent tokens.
        """
        assert self.open, "a request is answered once"
        assert token_ids[:kept] == self.known[:kept]
        self._close()
        chain = self.chain
        if self.main is not None:
            chain.main = self.main
        if not self.grows:
            # What another chain has written is not trained here.
            chain.token_ids, chain.mask, chain.log_probs = self.known[:kept], [0] * kept, [0.0] * kept
            if not self.known:
                chain.start = len(token_ids)
            if self._chains.all:
                self._chains.reasons[self.why] += 1
            self._chains.all.append(chain)
        chain.grow(token_ids, kept, answer)
        chain.answers += 1
        chain.last = next(self._chains.answered)
        if said is not None:
            chain.messages = [*self.previous, *self.new, said]
            chain.identities = [*self.identities, identity(said)]
        elif not self.grows:
            chain.messages = self.previous
        messages = None if said is None else len(chain.messages)
        chain.boundaries.append(Boundary(messages, len(chain.token_ids)))

    def abandon(self) -> None:
        """Leave the chains as they are. Idempotent."""
        if self.open:
            self._close()
            self._chains.forget_first()

    def _close(self) -> None:
        self.open = False
        if self.grows:
            self.chain.busy = False
        else:
            self._chains.beginning -= 1


class Chains:
    """All conversations of a session."""

    def __init__(self, limit: int) -> None:
        """`limit`: the number of chains."""
        self._limit = limit
        self.all: list[Chain] = []
        self.beginning = 0
        """Requests in flight that will begin a chain."""
        self.answered = itertools.count(1)
        self._first: Chain | None = None
        """The first request, which has no answer there."""
        self.reasons: Counter[str] = Counter()
        """Why chains after the first were begun; see `RowReason`."""

    def open(
        self,
        messages: Sequence[Message],
        tools: Hashable = (),
        *,
        main: bool | None = None,
        from_scratch: bool = False,
    ) -> OpenRequest:
        """Return the request for these messages. `from_scratch`: use no history; `main`: whether it belongs
        to the main conversation, None for the one of the messages that it is most like.

        Raises RequestRefused if it needs another chain and there are as many as there may be.
        """
        found = identities(messages)
        best: tuple[int, bool, int] = (0, False, 0)
        anchor: tuple[Chain, Boundary] | None = None
        for chain in () if from_scratch else self.all:
            boundary = _common(chain, found) if chain.tools == tools else None
            if boundary is not None:
                rank = (boundary.messages or 0, _grows(chain, boundary), chain.last)
                if rank > best:
                    best, anchor = rank, (chain, boundary)
        request = self._open(anchor, tools)
        request.new = list(messages[len(request.previous) :])
        request.identities = found
        self._first = self._first or Chain(tools, 0, identities=found)
        why, like_main = self._compared(found, tools)
        request.why = "template" if from_scratch else why
        if main is not None or not request.grows:
            request.main = like_main if main is None else main
        return request

    def forget_first(self) -> None:
        """Let the next request begin the main conversation, if no request so far has an answer or waits."""
        if not self.all and not self.beginning:
            self._first = None

    def open_tokens(self, token_ids: list[int], *, main: bool | None = None) -> OpenRequest:
        """Return the request for a prompt of tokens, as `open`. Raises as `open`."""
        best: tuple[int, bool, int] = (0, False, 0)
        anchor: tuple[Chain, Boundary] | None = None
        for chain in self.all:
            shared = _shared_tokens(chain.token_ids, token_ids)
            boundary = next((one for one in reversed(chain.boundaries) if one.tokens <= shared), None)
            if boundary is None:
                continue
            rank = (boundary.tokens, _grows(chain, boundary), chain.last)
            if rank > best:
                best, anchor = rank, (chain, boundary)
        request = self._open(anchor, ())
        request.main = main
        if not request.grows and main is None and anchor is not None:
            request.main = anchor[0].main
        return request

    def _compared(self, wanted: list[Hashable], tools: Hashable) -> tuple[RowReason, bool]:
        """Return how a request differs from the chain that is most like it, and whether it is a main one."""

        def alike(chain: Chain) -> tuple[int, bool, int]:
            return shared(chain.identities, wanted), chain.tools == tools, chain.last

        nearest = max(self.all, key=alike, default=self._first)
        assert nearest is not None
        why = difference(nearest.identities, wanted, same_tools=nearest.tools == tools)
        # Agents with tools ask without them for what they do not act upon: titles, summaries, memories.
        gains = bool(tools) - bool(nearest.tools)
        return why, why != "others" and (gains > 0 or (nearest.main and gains == 0))

    def rows(
        self, prompt_limit: int, lost: Collection[AnswerPlace] = (), *, auxiliary: bool = True
    ) -> list[ChainRow]:
        """Return the chains for training, the main one with the last answer last.

        `lost`: answers that the agent has not received; `auxiliary`: with chains that are not main.
        """
        kept = [found for chain in self.all if (found := chain.received(lost)) is not None]
        ordered = sorted(kept, key=lambda chain: (chain.main, chain.last))
        main = [chain for chain in ordered if chain.main]
        return [chain.row(prompt_limit) for chain in (ordered if auxiliary else main or ordered)]

    def _open(self, anchor: tuple[Chain, Boundary] | None, tools: Hashable) -> OpenRequest:
        if anchor is not None and _grows(*anchor):
            chain, boundary = anchor
            chain.busy, chain.continued = True, boundary.tokens
            return OpenRequest(self, chain, grows=True, known=chain.token_ids, previous=chain.messages)

        if len(self.all) + self.beginning >= self._limit:
            raise RequestRefused(
                "the request begins another conversation, because it does not append to one of this session, "
                f"which may have {self._limit}; raise agentic.gateway.max_chains, or send each request "
                "once, with the whole history unchanged",
                end="chains",
            )
        self.beginning += 1
        if anchor is None:
            return OpenRequest(self, Chain(tools, 0), grows=False, known=[], previous=[])
        chain, boundary = anchor
        chain.continued = max(chain.continued, boundary.tokens)
        return OpenRequest(
            self,
            Chain(tools, chain.start),
            grows=False,
            known=chain.token_ids[: boundary.tokens],
            previous=chain.messages[: boundary.messages or 0],
        )


def _shared_tokens(one: list[int], other: list[int]) -> int:
    """Return how many tokens two lists have in common from their beginning: each is read twice at most."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _grows(chain: Chain, boundary: Boundary) -> bool:
    return not chain.busy and boundary is chain.boundaries[-1]


def _common(chain: Chain, wanted: list[Hashable]) -> Boundary | None:
    """Return the last boundary of a chain up to which it has the wanted messages, followed by new ones."""
    for boundary in reversed(chain.boundaries):
        count = boundary.messages
        if count is None or count >= len(wanted):
            continue
        if chain.identities[:count] == wanted[:count]:
            return boundary
    return None
