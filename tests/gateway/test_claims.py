# SPDX-License-Identifier: Apache-2.0
"""External runners: one owner for each task, and a lease that ends."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from recipe.async_pipeline.errors import RequestRefused
from recipe.async_pipeline.gateway import client
from recipe.async_pipeline.gateway.claims import ClaimLost, Claims
from recipe.async_pipeline.gateway.client import claimed
from tests import HANG_S

Serve = Callable[..., Any]
PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
TASK = {"messages": [], "seed": 3, "base_url": "http://x/v1", "api_key": "k"}


def post(url: str, key: str, path: str, body: Any) -> tuple[int, Any]:
    """Send a request of a runner. Returns status and answer; None for a refusal's."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = Request(url.removesuffix("/v1") + path, json.dumps(body).encode(), headers)
    try:
        with urlopen(request, timeout=HANG_S) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        with error:
            return error.code, None


@pytest.mark.virtual_time
async def test_a_task_has_one_owner_and_a_reward() -> None:
    claims = Claims(60)
    offer = await claims.offer(TASK)
    first, second = await asyncio.gather(claims.claim(1), claims.claim(1))
    assert second is None and first is not None and first.task == TASK
    assert offer.claimed.done() and not offer.ended.done()
    claims.finish(first.lease, 0.5)
    assert await offer.ended == 0.5
    for late in (
        claims.renew,
        lambda lease: claims.finish(lease, 1.0),
        lambda lease: claims.fail(lease, ""),
    ):
        with pytest.raises(RequestRefused, match="the lease has ended") as refused:
            late(first.lease)
        assert refused.value.status == 410


@pytest.mark.virtual_time
async def test_a_runner_waits_for_a_task() -> None:
    claims, loop = Claims(60), asyncio.get_running_loop()
    waiting = asyncio.create_task(claims.claim(30))
    await asyncio.sleep(20)
    await claims.offer(TASK)
    assert (await waiting) is not None and loop.time() < 30


@pytest.mark.virtual_time
async def test_a_runner_that_stops_waiting_takes_neither_a_task_nor_its_notice() -> None:
    claims = Claims(60)
    gone, waiting = (asyncio.create_task(claims.claim(30)) for _ in range(2))
    await asyncio.sleep(1)
    await claims.offer(TASK)
    gone.cancel()
    assert (await waiting) is not None
    assert asyncio.get_running_loop().time() < 30


@pytest.mark.virtual_time
async def test_a_lease_that_is_renewed_does_not_expire_and_another_one_does() -> None:
    claims = Claims(60)
    offer = await claims.offer(TASK)
    found = await claims.claim(1)
    assert found is not None and found.lease_s == 60
    for _ in range(10):
        await asyncio.sleep(50)
        claims.renew(found.lease)
    await asyncio.sleep(59)
    assert not offer.ended.done()
    with pytest.raises(ClaimLost, match="not renewed its lease for 60 s"):
        await offer.ended
    with pytest.raises(RequestRefused, match="the lease has ended"):
        claims.renew(found.lease)


@pytest.mark.virtual_time
async def test_a_task_that_is_not_needed_any_more_is_neither_claimed_nor_finished() -> None:
    claims = Claims(60)
    offered, leased = await claims.offer(TASK), await claims.offer(TASK)
    claims.withdraw(offered)
    found = await claims.claim(0)
    assert found is not None and leased.claimed.done()
    for _ in range(2):
        claims.withdraw(leased)
    with pytest.raises(RequestRefused, match="the lease has ended"):
        claims.finish(found.lease, 1.0)
    assert await claims.claim(0) is None


@pytest.mark.virtual_time
async def test_a_runner_that_cannot_play_says_why() -> None:
    claims = Claims(60)
    offer = await claims.offer(TASK)
    found = await claims.claim(0)
    assert found is not None
    claims.fail(found.lease, "no sandbox")
    with pytest.raises(ClaimLost, match="its runner reports: no sandbox"):
        await offer.ended


async def in_thread(call: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, call, *args)


async def test_the_client_claims_renews_and_finishes(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed: list[str] = []
    enough = threading.Event()

    # The client renews often, and the lease does not expire however slow the machine is.
    claims = Claims(0.03)
    monkeypatch.setattr(claims, "_schedule", lambda lease, offer: None)
    renew = claims.renew

    def noted(lease: str) -> None:
        renew(lease)
        renewed.append(lease)
        if len(renewed) == 3:
            enough.set()

    monkeypatch.setattr(claims, "renew", noted)
    async with serve(claims=claims) as at:
        (tmp_path / "gateway-1.json").write_text(json.dumps({"url": at.url, "key": claims.key}))
        (tmp_path / "gateway-2.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "key": "k"}))
        offer = await claims.offer({**TASK, "unix_socket": "/a/b"})

        def plays() -> None:
            while True:
                with claimed(tmp_path, 0.02) as task:
                    if task is None:
                        continue
                    assert (task.shown, task.base_url) == ({"messages": [], "seed": 3}, "http://x/v1")
                    assert task.unix_socket == "/a/b"
                    assert enough.wait(HANG_S)
                    task.reward = 0.25
                return

        await in_thread(plays)
        assert await offer.ended == 0.25

        broken = await claims.offer(TASK)

        def breaks() -> None:
            found = None
            while found is None:
                found = client.claim(tmp_path, 0.02)
            found.fail("ValueError: a bug")

        await in_thread(breaks)
        with pytest.raises(ClaimLost, match="ValueError: a bug"):
            await broken.ended


async def test_the_runner_of_the_page_survives_an_episode_that_fails(
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (code,) = (one for one in PAGE.read_text(encoding="utf-8").split("```") if "from client import" in one)
    code = code.removeprefix("python").replace("/shared/runners", str(tmp_path))
    monkeypatch.setitem(sys.modules, "client", client)

    claims = Claims(60)
    async with serve(claims=claims) as at:
        (tmp_path / "gateway-1.json").write_text(json.dumps({"url": at.url, "key": claims.key}))
        broken, fine, last = [await claims.offer(TASK) for _ in range(3)]
        ends = iter((ValueError("the sandbox is broken"), 0.5, SystemExit()))

        def plays(shown: Any, base_url: str, api_key: str) -> float:
            end: float | BaseException = next(ends)
            if isinstance(end, BaseException):
                raise end
            return end

        def runs() -> None:
            with pytest.raises(SystemExit):
                exec(code, {"play": plays})  # noqa: S102 - the code of the page

        await in_thread(runs)
        with pytest.raises(ClaimLost, match="its runner reports: ValueError: the sandbox is broken"):
            await broken.ended
        assert await fine.ended == 0.5
        with pytest.raises(ClaimLost, match="SystemExit"):
            await last.ended
    assert "the sandbox is broken" in caplog.text


async def test_only_the_run_key_claims_and_only_finite_rewards_are_taken(serve: Serve) -> None:
    claims = Claims(60)
    async with serve(claims=claims) as at:
        await claims.offer(TASK)

        def refused(key: str, path: str, body: Any) -> int:
            return post(at.url, key, path, body)[0]

        def tries() -> list[int]:
            keys = at.session.keys
            found = [refused(key, "/v1/tasks/claim", {}) for key in (keys.model, keys.control, "none")]
            lease = post(at.url, claims.key, "/v1/tasks/claim", {})[1]["lease"]
            return [
                *found,
                refused(claims.key, "/v1/tasks/claim", {"wait_s": 1e9}),
                refused(lease, "/v1/chat/completions", {}),
                refused(lease, "/v1/tasks/finish", {"reward": "much"}),
                refused(claims.key, "/v1/tasks/finish", {"reward": 1.0}),
            ]

        assert await in_thread(tries) == [401, 401, 401, 422, 401, 400, 410]


async def test_a_runner_that_dies_while_it_waits_gets_no_task(serve: Serve) -> None:
    claims = Claims(60)
    async with serve(claims=claims) as at:
        _, writer = await asyncio.open_connection("127.0.0.1", int(at.url.rpartition(":")[2]))
        body = b'{"wait_s": 50}'
        head = f"POST /v1/tasks/claim HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {claims.key}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        while not claims.waiting:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
        writer.transport.abort()
        while claims.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        offer = await claims.offer(TASK)
        assert not offer.claimed.done()
        assert await claims.claim(0) is not None


@pytest.mark.parametrize("answer", ["401", "404", "501", "no task", "no http"])
async def test_runners_pass_over_a_file_whose_port_something_else_uses(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(client, "random", SimpleNamespace(shuffle=lambda files: None))

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        text = {"no http": "-ERR\r\n", "no task": 'HTTP/1.0 200 OK\r\n\r\n{"a": 1}'}
        writer.write(text.get(answer, f"HTTP/1.0 {answer} No\r\n\r\n<html>").encode())
        writer.close()

    claims = Claims(60)
    server = await asyncio.start_server(other, "127.0.0.1", 0)
    async with server, serve(claims=claims) as at:
        port = server.sockets[0].getsockname()[1]
        for name, url in (("1", f"http://127.0.0.1:{port}"), ("2", at.url)):
            found = {"url": url, "key": claims.key}
            (tmp_path / f"gateway-{name}.json").write_text(json.dumps(found))
        (tmp_path / "gateway-3.json").write_text("[]")
        await claims.offer(TASK)
        found = await in_thread(client.claim, tmp_path, 0.02)
        assert found is not None and found.base_url == "http://x/v1"


async def test_without_external_runners_there_are_no_tasks(serve: Serve) -> None:
    async with serve() as at:
        assert await in_thread(post, at.url, "k", "/v1/tasks/claim", {}) == (404, None)
