# SPDX-License-Identifier: Apache-2.0
"""The routes that are no dialect, and what all of them refuse."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from recipe.async_pipeline.errors import RequestRefused
from recipe.async_pipeline.gateway.claims import Claims
from recipe.async_pipeline.gateway.registry import Sessions
from recipe.async_pipeline.gateway.sessions import Session
from tests import HANG_S
from tests.fakes.agent_policy import END, LIMITS, FakePolicy

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
from starlette.routing import Route  # noqa: E402

from recipe.async_pipeline.gateway import task_routes  # noqa: E402
from recipe.async_pipeline.gateway.app import CONVERSATION, MAX_MARKS, Gateway  # noqa: E402

Serve = Callable[..., Any]
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "go"}]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_tokens_in_tokens_log_probs_and_versions_out(serve: Serve) -> None:
    async with serve(FakePolicy("ab", "c")) as at, httpx.AsyncClient(base_url=at.url) as http:
        headers = bearer(at.session.keys.model)
        first = (await http.post("/v1/generate", json={"prompt_ids": [1, 2]}, headers=headers)).json()
        assert first == {
            "token_ids": [*b"ab", END],
            "log_probs": [-1.0, -1.015625, -1.03125],
            "versions": [0, 0, 0],
            "finish": "stop",
        }
        prompt = [1, 2, *first["token_ids"], 3]
        body = {"prompt_ids": prompt, "max_tokens": 1}
        second = (await http.post("/v1/generate", json=body, headers=headers)).json()
        assert (second["token_ids"], second["finish"]) == ([*b"c"], "length")
        (row,) = at.session.rows()
        assert row.prompt_ids + row.response_ids == [*prompt, *b"c"]


async def test_only_the_control_key_rewards_ends_and_sees_the_session(serve: Serve) -> None:
    async with serve(FakePolicy("ab")) as at, httpx.AsyncClient(base_url=at.url) as http:
        model, control = bearer(at.session.keys.model), bearer(at.session.keys.control)
        for path, body in (("reward", {"reward": 1.0}), ("end", {})):
            refused = await http.post(f"/v1/session/{path}", json=body, headers=model)
            assert refused.status_code == 403
            assert "needs the control key" in refused.json()["error"]["message"]
        assert (await http.get("/v1/session", headers=model)).status_code == 403
        assert at.session.reward is None and at.session.ended is None

        await http.post(CHAT, json=BODY, headers=model)
        for reward in (0.25, 2):
            await http.post("/v1/session/reward", json={"reward": reward}, headers=control)
        seen = (await http.get("/v1/session", headers=control)).json()
        assert seen == {
            "turns": 1,
            "chains": 1,
            "tokens": 3,
            "versions": [0],
            "coalesced": 0,
            "overridden": 0,
            "ignored": {},
            "reward": 2.0,
            "turn_rewards": {},
            "ended": None,
            "seconds_left": None,
        }
        for _ in range(2):
            ended = await http.post("/v1/session/end", json={"reason": "enough"}, headers=control)
            assert ended.status_code == 200
        late = await http.post(CHAT, json=BODY, headers=model)
        assert (late.status_code, late.headers["x-should-retry"]) == (410, "false")
        assert "has ended: enough" in late.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"{}", b'{"reward": "1"}', b'{"reward": NaN}', b'{"reward": null}', b""])
async def test_a_reward_that_is_no_number(serve: Serve, body: bytes) -> None:
    async with serve() as at, httpx.AsyncClient(base_url=at.url) as http:
        headers = bearer(at.session.keys.control)
        refused = await http.post("/v1/session/reward", content=body, headers=headers)
        assert refused.status_code == 422 and at.session.reward is None


async def test_a_session_tells_how_long_its_episode_may_take(serve: Serve) -> None:
    async with serve() as at, httpx.AsyncClient(base_url=at.url) as http:
        timed = Session(FakePolicy(), LIMITS, lambda: 12.5)
        at.sessions.add(timed)
        seen = (await http.get("/v1/session", headers=bearer(timed.keys.control))).json()
        assert seen["seconds_left"] == 12.5


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/generate"])
async def test_a_policy_that_cannot_answer_is_503_with_a_time_and_then_410(serve: Serve, path: str) -> None:
    body = {**BODY, "model": "policy", "max_tokens": 5, "prompt_ids": [1], "input": "go"}

    async with serve() as at, httpx.AsyncClient(base_url=at.url) as http:
        headers = bearer(at.session.keys.model)
        early = await http.post(path, json={"prompt_ids": "x"}, headers=headers)
        assert early.status_code == 400 and "retry-after" not in early.headers
        at.policy.error = RuntimeError("all replicas are gone")
        found = await http.post(path, json=body, headers=headers)
        assert (found.status_code, found.headers["retry-after"]) == (503, "1")
        assert found.headers["x-should-retry"] == "false"
        late = await http.post(path, json=body, headers=headers)
        assert late.status_code == 410 and "retry-after" not in late.headers


async def test_turns_get_rewards_by_their_number_or_their_id(serve: Serve) -> None:
    limits = dataclasses.replace(LIMITS, turn_rewards=True)

    async with serve(FakePolicy("ab", "", "c"), limits) as at, httpx.AsyncClient(base_url=at.url) as http:
        model, control = bearer(at.session.keys.model), bearer(at.session.keys.control)

        async def give(**body: Any) -> Any:
            return await http.post("/v1/session/reward", json=body, headers=control)

        early = await give(reward=1.0, turn=1)
        assert (early.status_code, at.session.turn_rewards.rewards) == (422, {})
        messages, ids = list(BODY["messages"]), []
        for path in (CHAT, "/v1/messages", "/v1/responses"):
            body = {"model": "policy", "messages": messages, "input": messages, "max_tokens": 9}
            answer = (await http.post(path, json=body, headers=model)).json()
            ids.append(answer["id"])
            said = at.session.chains.all[0].messages[-1]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
        for reward, turn in ((5.0, 1), (0.5, ids[0]), (-1.0, ids[2]), (0.25, 2)):
            assert (await give(reward=reward, turn=turn)).status_code == 200
        for turn in (0, 4, -1, "chatcmpl-none", ""):
            assert (await give(reward=1.0, turn=turn)).status_code == 422
        seen = (await http.get("/v1/session", headers=control)).json()
        assert seen["turn_rewards"] == {"1": 0.5, "2": 0.25, "3": -1.0} and seen["reward"] is None

        (row,) = at.session.rows()
        ends = [i for i, one in enumerate(row.response_ids) if one == END]
        placed = at.session.turn_rewards.placed(row, None)
        assert placed == [*zip(ends, (0.5, 0.25, -1.0), strict=True)]


async def test_a_reward_of_a_turn_requires_the_knob(serve: Serve) -> None:
    async with serve(FakePolicy("ab")) as at, httpx.AsyncClient(base_url=at.url) as http:
        await http.post(CHAT, json=BODY, headers=bearer(at.session.keys.model))
        body = {"reward": 1.0, "turn": 1}
        found = await http.post("/v1/session/reward", json=body, headers=bearer(at.session.keys.control))
        assert found.status_code == 422
        assert "requires agentic.turn_rewards=True" in found.json()["error"]["message"]
        (row,) = at.session.rows()
        assert at.session.turn_rewards.placed(row, 1.0) == []


async def test_models(serve: Serve) -> None:
    async with serve() as at, httpx.AsyncClient(base_url=at.url) as http:
        headers = {"x-api-key": at.session.keys.model}
        listed = (await http.get("/v1/models", headers=headers)).json()
        assert [one["id"] for one in listed["data"]] == ["policy"]
        assert (await http.get("/v1/models/any/name", headers=headers)).json()["id"] == "policy"
        assert (await http.get("/v1/models")).status_code == 401


@pytest.mark.parametrize(
    ("limits", "headers", "scored"),
    [
        ({}, {}, "answer"),
        ({"main_model": "small"}, {}, "title"),
        ({}, {CONVERSATION: "main"}, "title"),
        ({"auxiliary": False}, {}, "answer"),
    ],
)
async def test_the_main_conversation_is_scored(
    serve: Serve, limits: dict[str, Any], headers: dict[str, str], scored: str
) -> None:
    async with serve(FakePolicy("answer", "title"), dataclasses.replace(LIMITS, **limits)) as at:
        key = bearer(at.session.keys.model)
        async with httpx.AsyncClient(base_url=at.url, headers=key) as client:
            await client.post(CHAT, json={**BODY, "model": "large"})
            # It is like the first one, but for the model's name.
            body = {**BODY, "model": "small"}
            await client.post(CHAT, json=body, headers=headers)
            wrong = await client.post(CHAT, json=body, headers={CONVERSATION: "side"})
        assert wrong.status_code == 400 and "must be main or auxiliary, got 'side'" in wrong.text
        rows = at.session.rows()
        assert len(rows) == 1 + limits.get("auxiliary", True)
        assert bytes(rows[-1].response_ids[:-1]).decode() == scored


async def test_a_body_that_is_too_large(serve: Serve) -> None:
    async with serve(max_body_bytes=1000) as at, httpx.AsyncClient(base_url=at.url) as http:
        body = {"messages": [{"role": "user", "content": "x" * 2000}]}
        refused = await http.post(CHAT, json=body, headers=bearer(at.session.keys.model))
        assert refused.status_code == 413 and at.policy.prompts == []


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"]
)
async def test_a_body_of_too_many_values_is_not_read(serve: Serve, path: str) -> None:
    """Reading ten million empty values would block the event loop for ten seconds."""
    async with serve() as at, httpx.AsyncClient(base_url=at.url) as http:
        body = b'{"model": "m", "messages": [' + b"{}," * MAX_MARKS + b"{}]}"
        refused = await http.post(path, content=body, headers=bearer(at.session.keys.model))
        assert refused.status_code == 413 and "commas and opening brackets, at most 400000" in refused.text


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/generate"])
async def test_a_session_with_too_many_requests_is_429_with_a_time(
    serve: Serve, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_routes, "MAX_REQUESTS", 0)
    async with serve() as at, httpx.AsyncClient(base_url=at.url) as http:
        found = await http.post(path, json=BODY, headers=bearer(at.session.keys.model))
        assert (found.status_code, found.headers["retry-after"]) == (429, "1")
        assert "x-should-retry" not in found.headers and at.session.ended is None


async def test_sessions_do_not_see_each_other(serve: Serve) -> None:
    async with serve() as at, httpx.AsyncClient(base_url=at.url, timeout=HANG_S) as http:
        others = [Session(FakePolicy(f"answer {i}"), LIMITS) for i in range(64)]
        sessions: Sessions = at.sessions
        for one in others:
            sessions.add(one)

        async def ask(one: Session) -> str:
            answer = await http.post(CHAT, json=BODY, headers=bearer(one.keys.model))
            return str(answer.json()["choices"][0]["message"]["content"])

        assert await asyncio.gather(*map(ask, others)) == [f"answer {i}" for i in range(64)]
        assert [len(one.rows()) for one in others] == [1] * 64 and at.session.rows() == []


async def test_an_update_of_the_weights_is_no_error(serve: Serve) -> None:
    async with serve(FakePolicy("abcdef")) as at, httpx.AsyncClient(base_url=at.url) as http:
        at.policy.gate.clear()
        headers = bearer(at.session.keys.model)
        asking = asyncio.create_task(http.post("/v1/generate", json={"prompt_ids": [1]}, headers=headers))
        while not at.policy.prompts:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)
        at.policy.version = 7
        at.policy.gate.set()
        answer = await asking
        assert answer.status_code == 200
        assert json.loads(answer.content)["versions"] == [0, 0, 0, 7, 7, 7, 7]


@pytest.mark.slow
async def test_every_route_requires_a_key(serve: Serve) -> None:
    """The gateway may listen on other addresses than loopback."""
    claims = Claims(60)
    async with serve(FakePolicy(), claims=claims) as at, httpx.AsyncClient(base_url=at.url) as http:
        routes = [
            route for route in Gateway(at.sessions, claims=claims).app.routes if isinstance(route, Route)
        ]
        assert len(routes) > 12
        for route in routes:
            (method,) = {*(route.methods or ())} - {"HEAD"}
            for headers in ({}, bearer("sk-model-guess")):
                path = route.path.replace("{name:path}", "policy")
                answer = await http.request(method, path, headers=headers, content=b"{}")
                assert answer.status_code in (401, 410), route.path


class Refusing(FakePolicy):
    """Refuses each request, whose messages are as large as the agent likes."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[weakref.ref[Any]] = []
        """Of each request, what its coroutine had."""

    async def begin(self, *_: Any) -> NoReturn:
        body = {1}
        self.held.append(weakref.ref(body))
        await self.gate.wait()
        raise RequestRefused("the chat template refuses")


@pytest.mark.parametrize(("stream", "status"), [(False, 400), (True, 400), (True, 200)])
async def test_a_request_that_was_refused_is_not_kept(serve: Serve, stream: bool, status: int) -> None:
    """Also before the garbage collector runs, which may take as long as the session."""
    policy = Refusing()
    late = status == 200
    async with (
        serve(policy, keep_alive_s=0.01 if late else HANG_S) as at,
        httpx.AsyncClient(base_url=at.url, headers=bearer(at.session.keys.model)) as http,
    ):
        gc.disable()
        try:
            for number in range(1, 4):
                if late:
                    policy.gate.clear()
                async with http.stream("POST", CHAT, json=BODY | {"stream": stream}) as refused:
                    policy.gate.set()
                    assert "the chat template refuses" in (await refused.aread()).decode()
                assert (refused.status_code, len(policy.held)) == (status, number)
            assert [held() for held in policy.held] == [None] * 3
        finally:
            gc.enable()
