# SPDX-License-Identifier: Apache-2.0
"""Requests to a session, their answers, and what a session needs of the policy. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from ..errors import RequestRefused
from .chains import AnswerPlace, ChainRow, Completion
from .conversation import Message, Said, SentPicture

ANY_TOOL = ""
"""As `Form.call`: the policy chooses the tool."""


class Form(NamedTuple):
    """What the answer to a request must look like; the engine writes no other tokens."""

    schema: Mapping[str, Any] | None = None
    """A JSON Schema of the answer, which may also be calls of tools if the request has any."""
    call: str | None = None
    """The name of the tool that the answer must call, or ANY_TOOL."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools of the request."""


class CannotAppend(ValueError):  # noqa: N818 - a condition of a model's template, not a failure
    """The chat template cannot append these messages to a conversation that was begun."""


class SessionEngine(Protocol):
    """What answers the requests of a session: a tokenizer and the engines."""

    @property
    def vocabulary(self) -> int:
        """Return how many tokens the model has; engines fail at other ids."""

    async def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a whole request. Raises RequestRefused if the chat template refuses it."""

    async def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without a chat template."""

    async def append(
        self,
        previous: Sequence[Message],
        new: Sequence[Message],
        token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[list[int], int]:
        """Return `token_ids`, the tokens of `previous`, with new messages, and how many of them were kept.

        The last message of `previous` may lack its end: a limit of the agent has ended it.
        Raises CannotAppend, and as `begin`.
        """

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        max_tokens: int,
        stop: Sequence[str],
        form: Form | None = None,
        pictures: Sequence[SentPicture] = (),
    ) -> Completion:
        """Have an engine answer. The run's sampling parameters apply. Errors end the run.

        `pictures`: the ones that the tokens have placeholders for, in their order.

        Raises RequestRefused if the engine cannot keep to the form, or takes fewer pictures.
        """

    async def read(
        self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]], stop: Sequence[str]
    ) -> Said:
        """Return an answer as text and tool calls."""


class Ask(NamedTuple):
    """A request for a turn, in any dialect."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    """As OpenAI's chat API has them."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()
    """Parameters without effect that the agent named, such as the ones of sampling, which are the run's."""
    model: str = ""
    """The name that the agent uses for the policy."""
    main: bool | None = None
    """Whether the agent says that it belongs to the main conversation; None: it does not say."""
    prompt: str | list[int] | None = None
    """A text, or tokens, to continue without a chat template, in place of messages."""
    form: Form | None = None
    """None: the policy may write any text."""


class Reply(NamedTuple):
    """The answer to a request."""

    id: str
    said: Said
    finish: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    tokens: int


class TokenReply(NamedTuple):
    """The answer to a request that sent tokens."""

    token_ids: list[int]
    log_probs: list[float] | None
    versions: list[int]
    """Of each token."""
    finish: Literal["stop", "length"]
    id: str
    """Not for the client."""


class Deliveries:
    """Which answers a client has received: one that is tried again may wait for an answer several times."""

    def __init__(self) -> None:
        self.places: dict[str, AnswerPlace] = {}
        """Of each answer, by its id."""
        self._received: set[str] = set()
        self._lost: set[str] = set()

    def note(self, reply: Reply | TokenReply, *, received: bool) -> None:
        """Note whether a client that waited for an answer has received it."""
        (self._received if received else self._lost).add(reply.id)

    def lost(self) -> list[AnswerPlace]:
        """Return the answers that no client has received."""
        return [self.places[name] for name in self._lost - self._received]


def reply_of(name: str, said: Said, answer: Completion, prompt_tokens: int) -> Reply:
    """Return the answer to a request of so many tokens."""
    cut = not answer.whole and said.stop is None
    finish: Literal["stop", "length", "tool_calls"] = "length" if cut else "stop"
    return Reply(name, said, "tool_calls" if said.calls else finish, prompt_tokens, len(answer.token_ids))


def without_prefill(ask: Ask) -> tuple[list[Message], str]:
    """Return messages without a last one of the assistant, and its text, which the policy continues.

    If the answer must have a form, the message is a part of the history: a grammar begins with the answer.
    Raises RequestRefused if nothing precedes it, or if it has tool calls.
    """
    messages = ask.messages
    *before, last = messages
    if last["role"] != "assistant" or ask.form is not None:
        return messages, ""
    if not before:
        raise RequestRefused("a message must precede the text of the assistant that is to be continued")
    if last.get("tool_calls"):
        raise RequestRefused("the last message has tool calls; append their results")
    return before, last["content"]


class ContinuedText:
    """A text with its continuations, each as what it adds: a long conversation takes linear memory."""

    def __init__(self, token_ids: list[int] | None = None) -> None:
        """`token_ids`: what it adds to the text before it."""
        self._token_ids = token_ids or []
        self._after: dict[str, ContinuedText] = {}

    def known(self, text: str) -> tuple[int, list[int]]:
        """Return how many characters of a text have known tokens, and these tokens."""
        return self._find(text)[1:]

    def note(self, prompt: str, said: Said, token_ids: list[int]) -> None:
        """Note the tokens of a text and its continuation, with which an agent may begin another text."""
        node, at, known = self._find(prompt)
        added = ContinuedText(token_ids[len(known) :])
        rest = prompt[at:] + said.text
        # The agent may or may not repeat the stop text.
        node._after |= {one: added for one in (rest, rest + (said.stop or "")) if one}

    def _find(self, text: str) -> tuple[ContinuedText, int, list[int]]:
        """Return the longest text with which this one begins, its length, and its tokens."""
        node, at, token_ids = self, 0, list(self._token_ids)
        while rest := max((one for one in node._after if text.startswith(one, at)), key=len, default=""):
            node, at = node._after[rest], at + len(rest)
            token_ids += node._token_ids
        return node, at, token_ids


class _Place(NamedTuple):
    start: int
    """The first token of an answer in its conversation."""
    end: int
    """The token after its last one."""


class TurnRewards:
    """The rewards that the holder of the control key gave to turns. The last one of a turn counts.

    Rewards of single turns of a session, and where in its response each belongs. Pure.

    turn 1      turn 2      turn 3       turns count from 1, in the order of their answers
    ▲           ▲           ▲
    0.1         -           0.5          each at the last token that the policy wrote in its turn
    """

    def __init__(self, *, allowed: bool) -> None:
        """`allowed`: whether the run has rewards of turns (`agentic.turn_rewards`)."""
        self._allowed = allowed
        self.rewards: dict[int, float] = {}
        self._places: list[_Place] = []
        self._numbers: dict[str, int] = {}

    def answered(self, name: str, start: int, end: int) -> None:
        """Note a turn: the id of its answer, if it has one, and its tokens' positions in its conversation."""
        self._places.append(_Place(start, end))
        if name:
            self._numbers[name] = len(self._places)

    def give(self, turn: int | str, reward: float) -> None:
        """Set the reward of a turn, given its number or the id of its answer, as the API wrote it.

        Raises RequestRefused if turns have no rewards, if there is no such turn, or if the policy wrote
        nothing in it.
        """
        if not self._allowed:
            raise RequestRefused(
                "a reward of a turn requires agentic.turn_rewards=True; leave turn out for the reward of the "
                "episode",
                status=422,
            )
        count = len(self._places)
        if isinstance(turn, int):
            number: int | None = turn
        else:
            # APIs put a prefix before the id.
            number = self._numbers.get(turn.replace("_", "-").rpartition("-")[2])
        if number is None or not 1 <= number <= count:
            known = f"a number from 1 to {count}, or the id of an answer" if count else "left out"
            raise RequestRefused(
                f"turn must be {known}, got {turn!r}; the session has {count} answers", status=422
            )
        place = self._places[number - 1]
        if place.start == place.end:
            raise RequestRefused(
                f"turn {number} has no token that a reward could be given to; give it to another turn",
                status=422,
            )
        self.rewards[number] = reward

    def placed(self, row: ChainRow, last: float | None) -> list[tuple[int, float]]:
        """Return the position in the response, and the reward, of each turn that has one; then `last`, the
        reward of the episode, at the end. Empty without rewards of turns that are trained.

        `row`: the conversation of all turns.
        """
        if not self.rewards:
            return []
        start, mask, found = len(row.prompt_ids), row.mask, []
        for number, reward in sorted(self.rewards.items()):
            at = self._places[number - 1].end - 1 - start
            if at >= len(mask):
                # No client has received the answer, so it is not trained.
                continue
            # The end token of an answer may have been replaced when the conversation was continued.
            while at > 0 and not mask[at]:
                at -= 1
            found.append((at, reward))
        if last is not None:
            found.append((len(mask) - 1 - mask[::-1].index(1), last))
        return found
