# SPDX-License-Identifier: Apache-2.0
"""Chains: each row is what requests sent and what the engine answered, and no token is trained twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.core.groups.items import spans_of
from recipe.async_pipeline.errors import RequestRefused
from recipe.async_pipeline.gateway.chains import AnswerPlace, ChainRow, Chains, Completion, OpenRequest
from recipe.async_pipeline.gateway.conversation import Message

TURN_END, SEPARATOR, GENERATE = 900, 901, 902
MANY = 99


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tokens_of(message: Message) -> list[int]:
    return [ord(message["role"][0]), *map(ord, message["content"]), TURN_END]


class Sent(NamedTuple):
    """A request as the engine got it, and its answer."""

    prompt: list[int]
    answer: list[int]


class Agent:
    """Sends requests through chains, with a tokenizer of one token a letter."""

    def __init__(self, limit: int = MANY, *, trims: bool = False) -> None:
        """`trims`: the builder drops the last token of an answer when a message follows, as for GLM."""
        self.chains, self.trims = Chains(limit), trims
        self.sent: list[Sent] = []

    def begin(self, messages: Sequence[Message], tools: str = "") -> OpenRequest:
        return self.chains.open(messages, tools)

    def end(self, request: OpenRequest, *, whole: bool = True) -> Message:
        """Answer a request with tokens that no other answer has."""
        ended = request.known[-1:] == [TURN_END]
        kept = len(request.known) - (self.trims and ended)
        closing = [] if ended or self.trims else [TURN_END]
        prompt = [*request.known[:kept], *([*closing, SEPARATOR] if request.known else [])]
        prompt += [token for message in request.new for token in tokens_of(message)] + [GENERATE]
        version = len(self.sent)
        text = f"answer {version}"
        answer = [1000 + 10 * version + i for i in range(3)] + ([TURN_END] if whole else [])
        self.sent.append(Sent(prompt, answer))
        said = {"role": "assistant", "content": text}
        log_probs = [-float(token) for token in answer]
        request.commit(prompt, kept, Completion(answer, log_probs, spans_of([(version, 0)]), whole), said)
        return said

    def ask(self, messages: Sequence[Message], tools: str = "", *, whole: bool = True) -> list[Message]:
        """Return the history with the answer."""
        return [*messages, self.end(self.begin(messages, tools), whole=whole)]

    def check(self, prompt_limit: int = 10_000) -> list[ChainRow]:
        """Compare each row with what was sent; return the rows."""
        rows = self.chains.rows(prompt_limit)
        seen: list[int] = []
        for row in rows:
            whole, start = row.prompt_ids + row.response_ids, len(row.prompt_ids)
            assert start <= prompt_limit
            assert row.log_probs is not None
            assert len(row.response_ids) == len(row.mask) == len(row.log_probs)
            trained = [False] * len(whole)
            for version, at in row.spans:
                prompt, answer = self.sent[version]
                assert whole[: start + at] == prompt, "the tokens before an answer are its request"
                found = whole[start + at : start + at + len(answer)]
                if self.trims and found[-1] != answer[-1]:
                    answer = answer[:-1]
                assert found[: len(answer)] == answer
                trained[start + at : start + at + len(answer)] = [True] * len(answer)
                seen.append(version)
            assert row.mask == [int(on) for on in trained[start:]] and not any(trained[:start])
            expected = [-float(t) if on else 0.0 for t, on in zip(whole, trained, strict=True)]
            assert row.log_probs == expected[start:]
            assert row.answers == len(row.spans)
        assert sorted(seen) == list(range(len(self.sent))), "each answer is trained, and once"
        if rows:
            last = [chain.spans[-1].version for chain in self.chains.all if chain.main]
            assert not last or rows[-1].spans[-1].version == max(last), "the last main answer's row is last"
        return rows


def test_a_plain_conversation_is_one_row() -> None:
    agent = Agent()
    history = [user("q")]
    for text in ("a", "b", "c"):
        history = [*agent.ask(history), user(text)]
    (row,) = agent.check()
    assert row.prompt_ids == [*tokens_of(user("q")), GENERATE] and row.answers == 3
    assert [at for _, at in row.spans] == [0, 9, 18]
    assert len({chain.request_id for chain in agent.chains.all}) == 1


def test_an_edited_history_is_another_row_and_the_first_is_kept() -> None:
    agent = Agent()
    history = agent.ask([user("q")])
    agent.ask([history[0], {"role": "assistant", "content": "edited"}, user("go")])
    first, second = agent.check()
    assert second.prompt_ids[-1] == GENERATE and second.answers == first.answers == 1
    agent.ask([*history, user("on")])
    assert [row.answers for row in agent.check()] == [1, 2], "the first chain was still there"


def test_a_history_that_is_edited_late_keeps_the_tokens_before_the_edit() -> None:
    agent = Agent()
    history = agent.ask([*agent.ask([user("q")]), user("a")])
    edited = [*history[:3], {"role": "assistant", "content": "edited"}, user("b")]
    agent.ask(edited)
    first, second = agent.check()
    assert second.prompt_ids == first.prompt_ids
    assert second.response_ids[:4] == first.response_ids[:4] and second.mask[:4] == [0] * 4


def test_a_chain_that_is_being_answered_is_branched_off() -> None:
    agent = Agent()
    history = agent.ask([user("q")])
    first, second = agent.begin([*history, user("a")]), agent.begin([*history, user("b")])
    assert first.chain is not second.chain
    agent.end(second)
    agent.end(first)
    assert [row.answers for row in agent.check()] == [1, 2]


def test_the_longest_history_is_continued() -> None:
    agent = Agent()
    history = agent.ask([user("q")])
    first, second = agent.begin([*history, user("a")]), agent.begin([*history, user("b")])
    longer = [*history, user("b"), agent.end(second)]
    agent.end(first)
    agent.begin([*longer, user("c")])
    assert agent.begin([*longer, user("d")]).previous == longer, "although the other chain was answered last"


def test_the_end_of_an_answer_that_lacks_it_is_not_trained() -> None:
    agent = Agent()
    history = agent.ask([user("q")], whole=False)
    agent.ask([*history, user("a")])
    (row,) = agent.check()
    assert row.answers == 2 and row.mask[row.response_ids.index(TURN_END)] == 0


def test_a_request_that_fails_leaves_no_trace() -> None:
    agent = Agent(limit=1)
    agent.begin([user("q")]).abandon()
    history = agent.ask([user("q")])
    growing = agent.begin([*history, user("a")])
    growing.abandon()
    growing.abandon()
    agent.ask([*history, user("b")])
    assert [row.answers for row in agent.check()] == [2]


def test_the_limit_of_chains_counts_requests_in_flight() -> None:
    agent = Agent(limit=2)
    open_requests = [agent.begin([user("a")]), agent.begin([user("b")])]
    with pytest.raises(RequestRefused, match="begins another conversation.*which may have 2") as refused:
        agent.begin([user("c")])
    assert (refused.value.status, refused.value.end) == (400, "chains")
    for request in open_requests:
        agent.end(request)
    with pytest.raises(RequestRefused):
        agent.begin([user("c")])
    assert len(agent.check()) == 2


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


A, B = said("answer 0"), said("answer 1")


@pytest.mark.parametrize(
    ("why", "requests"),
    [
        ("system_prompt", [[system("7 left"), user("a")], [system("6 left"), user("a"), A, user("b")]]),
        ("reminder", [[user("a, hurry")], [user("a"), A, user("b, hurry")]]),
        ("history", [[user("a")], [user("a"), A, user("b")], [user("summary of a"), B, user("c")]]),
        ("history", [[user("a")], [user("a"), A, user("b")], [A, user("b"), B, user("c")]]),
        ("branch", [[user("a")], [user("a")]]),
        ("branch", [[user("a")], [user("a"), A, user("b")], [user("a"), A, user("c")]]),
        ("others", [[user("a")], [user("write a title")]]),
        ("others", [[system("play"), user("a")], [system("titles"), user("write a title")]]),
    ],
)
def test_the_reason_for_another_row_is_known(why: str, requests: list[list[Message]]) -> None:
    agent = Agent()
    for messages in requests:
        agent.ask(messages)
    assert agent.chains.reasons == {why: 1} and len(agent.check()) == 2


def test_tools_that_change_are_the_reason_for_another_row() -> None:
    agent = Agent()
    agent.end(agent.begin([user("a")], "one"))
    agent.end(agent.begin([user("a"), A, user("b")], "two"))
    assert agent.chains.reasons == {"tools": 1}
    agent.end(agent.begin([user("a"), A, user("b"), B, user("c")], "two"))
    assert agent.chains.reasons.total() == 1, "a request that appends has no reason"


def test_the_first_conversation_and_what_continues_it_are_main() -> None:
    agent = Agent()
    history = agent.ask([system("play"), user("a")])
    agent.ask([system("play, 6 left"), *history[1:], user("b")])
    agent.ask([system("titles"), user("write a title")])
    assert [chain.main for chain in agent.chains.all] == [True, True, False]
    assert [row.spans[0].version for row in agent.check()] == [2, 0, 1], "the row of the title is not scored"
    assert [row.spans[0].version for row in agent.chains.rows(MANY, auxiliary=False)] == [0, 1]


@pytest.mark.parametrize(
    "last",
    [
        [system("play"), user("write a title")],
        [system("play"), user("a"), A, user("b"), B, user("summarise")],
        [system("remember"), user("a"), A, user("b"), B],
    ],
)
def test_a_last_request_without_the_tools_of_the_agent_is_auxiliary(last: list[Message]) -> None:
    agent = Agent()
    history = agent.ask([system("play"), user("a")], "tools")
    agent.ask([*history, user("b")], "tools")
    after = agent.ask(last)
    assert [chain.main for chain in agent.chains.all] == [True, False]
    assert agent.check()[-1].answers == 2
    agent.ask([*after, user("next")], "tools")
    assert max(agent.chains.all, key=lambda chain: chain.last).main, "it has tools again"


def test_a_request_without_tools_is_auxiliary_while_the_first_one_is_in_flight() -> None:
    agent = Agent()
    first = agent.begin([system("play"), user("a")], "tools")
    agent.ask([system("play"), user("write a title")])
    agent.end(first)
    assert [chain.main for chain in agent.chains.all] == [False, True]


def test_the_first_conversation_is_main_although_another_one_is_answered_before() -> None:
    agent = Agent()
    first = agent.begin([user("a")])
    agent.ask([user("write a title")])
    agent.end(first)
    assert [chain.main for chain in agent.chains.all] == [False, True]


def test_an_agent_can_say_which_conversation_is_main() -> None:
    agent = Agent()
    agent.end(agent.chains.open([user("plan")], main=False))
    agent.end(agent.chains.open([user("a")], main=True))
    agent.end(agent.chains.open([user("plan"), A, user("b")]))
    assert [chain.main for chain in agent.chains.all] == [False, True], "the chain that grows stays as it is"
    tokens = Chains(MANY)
    for token, main in ((1, None), (2, False), (3, None)):
        request = tokens.open_tokens([token], main=main)
        request.commit([token], 0, Completion([7], None, spans_of([(token, 0)])), None)
    assert [chain.main for chain in tokens.all] == [True, False, True]


class Token(int):
    """A token that counts how often it is compared."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Token.compared += 1
        return int(self) == other


def test_a_chain_grows_in_place() -> None:
    """A copy at each turn would take quadratic time."""
    agent = Agent()
    history = agent.ask([user("a")])
    (chain,) = agent.chains.all
    lists = (chain.token_ids, chain.mask, chain.log_probs, chain.spans)
    agent.ask([*history, user("b")])
    grown = (chain.token_ids, chain.mask, chain.log_probs, chain.spans)
    assert all(one is other for one, other in zip(lists, grown, strict=True))
    agent.ask([*history, user("c")])
    assert all(one not in lists for one in (agent.chains.all[1].token_ids, agent.chains.all[1].mask))


@pytest.mark.slow
@pytest.mark.parametrize("edits", [False, True])
def test_a_request_of_tokens_is_read_a_fixed_number_of_times(
    edits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns before it make no difference."""
    monkeypatch.setattr(Token, "compared", 0)
    chains, prompt, read = Chains(MANY), [1], 0
    for turn in range(60):
        request = chains.open_tokens([Token(token) for token in prompt])
        request.commit(prompt, len(request.known), Completion([turn], None, spans_of([(0, 0)])), None)
        read += len(prompt) * len(chains.all)
        prompt = [*prompt, turn, *range(20)]
        if edits and turn == 30:
            prompt[300] = 1000
    assert Token.compared <= 4 * read and len(chains.all) == 1 + edits


def lost(agent: Agent, *numbers: int) -> list[AnswerPlace]:
    """Return the places of the last answers of some chains."""
    chains = [agent.chains.all[number] for number in numbers]
    return [AnswerPlace(chain.request_id, chain.last_start) for chain in chains]


@pytest.mark.parametrize("trims", [False, True])
def test_an_answer_that_is_lost_is_not_trained(trims: bool) -> None:
    agent = Agent(trims=trims)
    history = agent.ask([user("a")])
    agent.ask([*history, user("b")])
    agent.ask([user("a")])
    first, second = agent.chains.rows(MANY)
    (row,) = agent.chains.rows(MANY, lost(agent, 0, 1))
    assert (row.answers, len(row.spans)) == (1, 1) and row.mask == [1] * (3 if trims else 4)
    assert row.response_ids == first.response_ids[: len(row.mask)] and second.answers == 1
    places = lost(agent, 1)
    agent.ask([user("a"), said("answer 2"), user("c")])
    assert len(agent.chains.rows(MANY, places)) == 2, "the agent has continued it, so it was received"


def test_a_prompt_above_the_limit_continues_in_the_response() -> None:
    agent = Agent()
    agent.ask([user("long prompt")])
    (row,) = agent.check(prompt_limit=4)
    assert len(row.prompt_ids) == 4 and row.mask == [0] * 10 + [1] * 4


def test_the_room_for_an_answer() -> None:
    agent = Agent()
    request = agent.begin([user("q")])
    assert request.room(4, prompt_limit=10, response_limit=20) == 20
    assert request.room(15, prompt_limit=10, response_limit=20) == 15, "the rest of the prompt uses some"
    history = [user("q"), agent.end(request)]
    request = agent.begin([*history, user("a")])
    assert request.room(14, prompt_limit=10, response_limit=20) == 10, "as for one response of all turns"


def test_tokens_continue_the_chain_whose_tokens_they_begin_with() -> None:
    chains = Chains(MANY)

    def ask(prompt: list[int], answer: list[int]) -> list[int]:
        request = chains.open_tokens(prompt)
        request.commit(
            prompt, len(request.known), Completion(answer, None, spans_of([(1, 0)]), whole=False), None
        )
        return prompt + answer

    history = ask([1, 2], [3, 4])
    ask([*history, 5], [6])
    ask([*history, 7], [8])
    ask([1, 9], [3])
    rows = chains.rows(MANY)
    assert [row.prompt_ids + row.response_ids for row in rows] == [
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 7, 8],
        [1, 9, 3],
    ]
    assert [row.mask for row in rows] == [[1, 1, 0, 1], [0, 0, 0, 1], [1]]
    assert all(row.log_probs is None for row in rows)


OPERATIONS = st.sampled_from(
    ["continue", "resend", "edit", "compact", "branch", "cut", "tools", "fail", "two"]
)


def changed(kind: str, number: int, text: str, history: list[Message]) -> list[Message]:
    """Return what an agent sends that treats its history in this way."""
    if kind == "resend" and history:
        return history[:-1]
    if kind == "edit" and history:
        place = number % len(history)
        edited = {**history[place], "content": f"edited {text}"}
        return [*history[:place], edited, *history[place + 1 :], user(text)]
    if kind == "compact":
        return [{"role": "system", "content": f"summary {text}"}, user(text)]
    if kind == "branch":
        return [*history[: 2 * (number % (len(history) // 2 + 1))], user(text)]
    return [*history, user(text)]


def two_at_once(agent: Agent, request: list[Message]) -> list[list[Message]]:
    """Return two histories, of which the second request began while the first was in flight."""
    first, more = agent.begin(request), [*request, user("again")]
    try:
        second = agent.begin(more)
    except RequestRefused:
        first.abandon()
        raise
    return [[*more, agent.end(second)], [*request, agent.end(first)]]


@given(st.lists(st.tuples(OPERATIONS, st.integers(0, 50)), max_size=25), st.integers(1, 9), st.booleans())
def test_any_agent(operations: list[tuple[str, int]], limit: int, trims: bool) -> None:
    """Edits, repetitions, summaries, branches, answers that are cut off, and requests at the same time."""
    agent = Agent(limit, trims=trims)
    conversations: list[list[Message]] = [[]]

    def do(kind: str, number: int, text: str) -> None:
        request = changed(kind, number, text, conversations[number % len(conversations)])
        if kind == "fail":
            agent.begin(request).abandon()
        elif kind == "two":
            conversations.extend(two_at_once(agent, request))
        else:
            tools = "saw" if kind == "tools" else ""
            conversations.append(agent.ask(request, tools, whole=kind != "cut"))

    refused = 0
    for i, (kind, number) in enumerate(operations):
        try:
            do(kind, number, str(i))
        except RequestRefused:
            refused += 1
    rows = agent.check()
    assert len(rows) <= limit
    assert not any(chain.busy for chain in agent.chains.all) and agent.chains.beginning == 0
    if not refused and not rows:
        assert all(kind in ("fail", "resend") for kind, _ in operations)


@given(st.lists(st.integers(0, 3), max_size=12))
def test_any_agent_that_sends_tokens(choices: list[int]) -> None:
    chains: Any = Chains(MANY)
    histories: list[list[int]] = [[7]]
    answers: dict[int, list[int]] = {}
    for number, choice in enumerate(choices):
        prompt = [*histories[choice % len(histories)], choice]
        answer = [1000 + number]
        request = chains.open_tokens(prompt)
        assert request.known == prompt[: len(request.known)]
        request.commit(prompt, len(request.known), Completion(answer, [-1.0], spans_of([(number, 0)])), None)
        answers[number] = prompt
        histories.append([*prompt, *answer])
    found = []
    for row in chains.rows(MANY):
        whole = row.prompt_ids + row.response_ids
        for version, at in row.spans:
            assert whole[: len(row.prompt_ids) + at] == answers[version]
            found.append(version)
    assert sorted(found) == list(range(len(choices)))
