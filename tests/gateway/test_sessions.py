# SPDX-License-Identifier: Apache-2.0
"""Sessions: two keys, retries that cost nothing, deadlines, and one end."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.errors import RequestRefused, WaitTimeout
from recipe.async_pipeline.gateway import sessions
from recipe.async_pipeline.gateway.conversation import SentPicture
from recipe.async_pipeline.gateway.sessions import Session, SessionLimits, digest_of
from recipe.async_pipeline.gateway.turns import Ask, Form
from tests.fakes.agent_policy import END, LIMITS, FakePolicy


def ask(*texts: str, **more: Any) -> Ask:
    roles = ("user", "assistant")
    return Ask([{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], [], **more)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_conversation_becomes_one_row() -> None:
    policy = FakePolicy("one", "two")
    session = Session(policy, LIMITS)
    first = await session.turn(ask("q"))
    policy.version = 3
    second = await session.turn(ask("q", first.said.text, "next"))
    (row,) = session.rows()
    assert bytes(row.prompt_ids) == b"<user>q"
    assert row.response_ids == [*b"one", END, *b"<user>next", *b"two", END]
    assert row.mask == [1] * 4 + [0] * 10 + [1] * 4
    assert row.spans == [(0, 0), (3, 14)]
    assert (first.prompt_tokens, first.tokens, first.finish) == (7, 4, "stop")
    assert (second.prompt_tokens, second.tokens) == (21, 4)
    assert len(set(policy.request_ids)) == 1, "one replica has the tokens cached"
    assert session.counts.turns == 2


async def test_pictures_of_a_conversation_reach_the_engine_and_the_row() -> None:
    policy = FakePolicy("one", "two", "three")
    session = Session(policy, LIMITS)
    seen = [{"type": "text", "text": "q"}, {"type": "image", "image": SentPicture(b"red")}]
    messages: list[Any] = [{"role": "user", "content": seen}]
    messages.append((await session.turn(Ask(list(messages), []))).said.as_message())
    messages.append({"role": "user", "content": [{"type": "image", "image": SentPicture(b"blue")}]})
    last = await session.turn(Ask(list(messages), []))
    assert policy.pictures == [[b"red"], [b"red", b"blue"]]
    (row,) = session.rows()
    assert row.pictures == [SentPicture(b"red"), SentPicture(b"blue")] and row.answers == 2

    other = {"role": "user", "content": [{"type": "image", "image": SentPicture(b"green")}]}
    await session.turn(Ask([other], []))
    assert policy.pictures[-1] == [b"green"] and len(session.rows()) == 2, "another picture begins a chain"
    session.deliveries.note(last, received=False)
    assert sorted(row.answers for row in session.rows()) == [1, 1]
    assert [SentPicture(b"red")] in [row.pictures for row in session.rows()], (
        "the lost answer saw the other one"
    )


async def test_limits_of_tokens_and_stops() -> None:
    policy = FakePolicy("abcdef", "x STOP y")
    session = Session(policy, LIMITS)
    cut = await session.turn(ask("q", max_tokens=3))
    assert (cut.said.text, cut.finish) == ("abc", "length")
    stopped = await session.turn(ask("q2", stop=("STOP",)))
    assert (stopped.said.text, stopped.said.stop, stopped.finish) == ("x ", "STOP", "stop")


async def test_the_form_of_an_answer_reaches_the_policy() -> None:
    policy, form = FakePolicy(), Form(schema={"type": "object"})
    session = Session(policy, LIMITS)
    await session.turn(ask("q")._replace(form=form))
    await session.turn(ask("q2"))
    assert (policy.forms, session.counts.constrained) == ([form, None], 1)


async def test_a_form_may_follow_the_last_answer() -> None:
    """As LangGraph does. The answer is no beginning of the one that has the form."""
    policy, form = FakePolicy("5", "{}"), Form(schema={"type": "object"})
    session = Session(policy, LIMITS)
    await session.turn(ask("q"))
    typed = await session.turn(ask("q", "5")._replace(form=form))
    assert typed.said.text == "{}" and bytes(policy.prompts[-1]) == b"<user>q<assistant>5"
    _, row = session.rows()
    assert (row.answers, row.mask) == (1, [1, 1, 1])


async def test_a_conversation_continues_after_an_answer_that_the_agents_limits_ended() -> None:
    """The end of the turn is what the template writes, and not the policy's."""

    session = Session(FakePolicy("abcdef", "x STOP y", "z"), LIMITS)
    await session.turn(ask("q", max_tokens=3))
    await session.turn(ask("q", "abc", "r", stop=("STOP",)))
    await session.turn(ask("q", "abc", "r", "x ", "s"))
    (row,) = session.rows()
    assert row.response_ids[:4] == [*b"abc", END] and row.mask[:4] == [1, 1, 1, 0]
    assert row.answers == 3 and row.response_ids[-10:] == [END, *b"<user>s", *b"z", END]


@pytest.mark.parametrize("limit", [0, -1])
async def test_a_limit_below_one_token_is_refused(limit: int) -> None:
    session = Session(FakePolicy(), LIMITS)
    for request in (session.turn(ask("q", max_tokens=limit)), session.turn_of_tokens([1], limit)):
        with pytest.raises(RequestRefused, match=f"max_tokens must be >= 1, got {limit}"):
            await request
    assert session.rows() == []


async def test_the_room_of_a_response_is_the_limit() -> None:
    limits = SessionLimits(prompt_tokens=7, response_tokens=12)
    policy = FakePolicy("one", "two")
    session = Session(policy, limits)
    await session.turn(ask("q"))
    with pytest.raises(
        RequestRefused, match=r"context_length_exceeded: the request has 21 tokens"
    ) as refused:
        await session.turn(ask("q", "one", "next"))
    assert refused.value.end == "tokens"
    assert policy.limits == [12]
    assert [row.answers for row in session.rows()] == [1], "a refused request leaves no trace"


async def test_turns_are_limited_and_the_limit_is_remembered_until_an_answer() -> None:
    session = Session(FakePolicy(), dataclasses.replace(LIMITS, max_turns=1, max_chains=1))

    async def request(text: str) -> Any:
        return await session.once(text.encode(), lambda: session.turn(ask(text)), again=False)

    await request("q")
    with pytest.raises(RequestRefused, match="has used its 1 turns"):
        await request("q2")
    assert session.limit_hit == "turns" and session.ended is None


async def test_a_limit_is_remembered_when_a_request_from_before_it_is_answered() -> None:
    policy = FakePolicy()
    policy.gate.clear()
    session = Session(policy, dataclasses.replace(LIMITS, max_turns=2, max_chains=1))

    async def request(text: str) -> Any:
        return await session.once(text.encode(), lambda: session.turn(ask(text)), again=False)

    first = asyncio.create_task(request("q"))
    await settled()
    with pytest.raises(RequestRefused, match="begins another conversation"):
        await request("q2")
    policy.gate.set()
    said = (await first).said.text
    assert session.limit_hit == "chains"
    more = ask("q", said, "next")
    await session.once(b"q3", lambda: session.turn(more), again=False)
    assert session.limit_hit == "", "the agent copes with it"


async def test_limits_of_the_run_cut_an_answer_off_but_limits_of_the_agent_do_not() -> None:
    session = Session(FakePolicy("abcdef", "abcdef", "a"), dataclasses.replace(LIMITS, response_tokens=4))
    cut = []
    for request in (ask("q"), ask("q", max_tokens=2), ask("q")):
        await session.turn(request)
        cut.append(session.cut_off)
    assert cut == [True, False, False]


async def test_a_template_that_cannot_append_gets_the_whole_request_again() -> None:
    policy = FakePolicy("one", "two")
    session = Session(policy, LIMITS)
    await session.turn(ask("q"))
    policy.appends = False
    await session.turn(ask("q", "one", "next"))
    assert [row.answers for row in session.rows()] == [1, 1]
    assert session.counts.tokenized_again == 1


async def test_requests_that_cannot_be_answered_are_the_agents_fault() -> None:
    session = Session(FakePolicy(), LIMITS)
    alone = Ask([{"role": "assistant", "content": "nothing precedes it"}], [])
    for refused in (alone, ask("refuse")):
        with pytest.raises(RequestRefused) as error:
            await session.turn(refused)
        assert error.value.status == 400
    assert session.ended is None and session.rows() == []


async def test_a_request_that_is_sent_again_joins_the_one_in_flight() -> None:
    policy = FakePolicy("one")
    policy.gate.clear()
    session = Session(policy, LIMITS)

    def begin() -> Awaitable[Any]:
        return session.turn(ask("q"))

    first = asyncio.create_task(session.once(b"q", begin, again=False))
    await settled()
    first.cancel()
    await settled()
    second = asyncio.create_task(session.once(b"q", begin, again=True))
    await settled()
    policy.gate.set()
    reply = await second
    third = await session.once(b"q", begin, again=True)
    assert reply is third and reply.said.text == "one"
    assert len(policy.prompts) == 1 and len(session.rows()) == 1
    assert session.counts.coalesced == 2


async def test_an_equal_request_that_is_new_is_another_sample() -> None:
    policy = FakePolicy("one", "two")
    session = Session(policy, LIMITS)
    replies = [await session.once(b"q", lambda: session.turn(ask("q")), again=False) for _ in range(2)]
    assert [reply.said.text for reply in replies] == ["one", "two"]
    assert session.counts.coalesced == 0
    retried = await session.once(b"q", lambda: session.turn(ask("q")), again=True)
    assert retried is replies[1], "the latest one"


async def test_requests_in_flight_that_are_sent_again_cost_one_generation_each() -> None:
    policy = FakePolicy("one", "two")
    session = Session(policy, LIMITS)

    async def sent(text: str, *, again: bool) -> str:
        reply = await session.once(text.encode(), lambda: session.turn(ask(text)), again=again)
        return str(reply.said.text)

    first = [*await asyncio.gather(sent("a", again=False), sent("b", again=False))]
    assert first == ["one", "two"]
    assert [await sent(text, again=True) for text in "aba"] == ["one", "two", "one"]
    assert len(policy.prompts) == 2 and session.counts.coalesced == 3


async def test_an_error_of_the_engines_ends_the_session() -> None:
    policy = FakePolicy()
    policy.error = WaitTimeout("the balancer")
    session = Session(policy, LIMITS)
    with pytest.raises(RequestRefused) as refused:
        await session.once(b"q", lambda: session.turn(ask("q")), again=False)
    assert refused.value.status == 503
    assert session.over.exception() is policy.error and session.ended == "failed"
    with pytest.raises(RequestRefused, match="has ended: failed"):
        await session.once(b"q", lambda: session.turn(ask("q")), again=True)


async def test_the_end_gives_up_requests_in_flight() -> None:
    policy = FakePolicy()
    policy.gate.clear()
    session = Session(policy, LIMITS)
    waiting = asyncio.create_task(session.once(b"q", lambda: session.turn(ask("q")), again=False))
    await settled()
    await session.close("recalled")
    with pytest.raises(RequestRefused, match="has ended: recalled") as refused:
        await waiting
    assert refused.value.status == 410
    session.end("again")
    assert session.ended == "recalled" and session.over.exception() is None
    assert not session.chains.beginning


NAME: contextvars.ContextVar[str] = contextvars.ContextVar("name")


async def test_turns_run_in_the_context_of_the_session() -> None:
    """Versions, transcripts and attempts of an episode are context variables."""

    class Noting(FakePolicy):
        async def begin(self, messages: Any, tools: Any) -> list[int]:
            self.answers.append(NAME.get())
            return await super().begin(messages, tools)

    NAME.set("episode")
    policy = Noting()
    session = Session(policy, LIMITS)
    NAME.set("server")
    reply = await session.once(b"q", lambda: session.turn(ask("q")), again=False)
    assert reply.said.text == "episode"


async def test_tokens_in_and_versions_out() -> None:
    policy = FakePolicy("abc", "d")
    session = Session(policy, LIMITS)
    first = await session.turn_of_tokens([1, 2], None)
    assert first.token_ids == [*b"abc", END] and first.finish == "stop"
    policy.gate.clear()
    turning = asyncio.create_task(session.turn_of_tokens([1, 2, *first.token_ids, 5], None))
    await settled()
    policy.version = 4
    policy.gate.set()
    second = await turning
    assert second.versions == [0, 4]
    (row,) = session.rows()
    assert row.response_ids == [*b"abc", END, 5, *b"d", END] and row.spans == [(0, 0), (0, 5), (4, 6)]
    with pytest.raises(RequestRefused, match="at least one token"):
        await session.turn_of_tokens([], None)
    for wrong in (-1, END + 1, 1 << 70):
        with pytest.raises(RequestRefused, match=f"must be between 0 and 257, got {wrong}$"):
            await session.turn_of_tokens([1, wrong, 2], None)
    assert session.ended is None and len(policy.prompts) == 2


class SlowPolicy(FakePolicy):
    """Its tokenizer and its engine take time by a clock of the test."""

    now = 100.0

    async def begin(self, *args: Any) -> Any:
        self.now += 0.25
        return await super().begin(*args)

    async def generate(self, *args: Any) -> Any:
        self.now += 7.0
        return await super().generate(*args)


async def test_what_the_gateway_adds_is_without_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = SlowPolicy("one", "two")
    monkeypatch.setattr(sessions, "time", SimpleNamespace(perf_counter=lambda: policy.now))

    session = Session(policy, LIMITS)
    await session.turn(ask("q"))
    await session.turn_of_tokens([1], None, received=policy.now - 0.5)
    assert session.took_ms == [250.0, 500.0]


def test_digests_tell_parts_apart() -> None:
    assert digest_of(b"ab", b"c") != digest_of(b"a", b"bc")
    assert digest_of(b"a") == digest_of(b"a")
