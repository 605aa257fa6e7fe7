# SPDX-License-Identifier: Apache-2.0
"""The client for tokens, with the standard library only."""

from __future__ import annotations

import ast
import asyncio
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.gateway import client as module
from recipe.async_pipeline.gateway.client import Client, GatewayError
from tests.fakes.agent_policy import END, FakePolicy

Serve = Callable[..., Any]


async def test_a_conversation_in_tokens(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(FakePolicy("ab", "STOP")) as at:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{at.url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", at.session.keys.model)
        control = Client(at.url, at.session.keys.control)

        def talk() -> None:
            client = Client()
            turn = client.generate([1, 2])
            assert turn.token_ids == [*b"ab", END] and turn.versions == [0, 0, 0]
            assert turn.log_probs is not None and turn.finish == "stop"
            client.generate([1, 2, *turn.token_ids, 3], max_tokens=2, stop=["S"])
            with pytest.raises(GatewayError, match="403: this needs the control key") as refused:
                client.reward(1.0)
            assert refused.value.status == 403
            control.reward(0.5)
            assert control.status()["turns"] == 2
            control.end("enough")
            with pytest.raises(GatewayError, match="410: the session has ended: enough"):
                client.generate([1])

        await asyncio.get_running_loop().run_in_executor(None, talk)
        assert at.session.reward == 0.5 and len(at.session.rows()) == 1
        assert at.policy.limits[1] == 2 and list(at.policy.stops[1]) == ["S"]


async def test_a_request_that_is_sent_again_costs_no_second_generation(serve: Serve) -> None:
    async with serve(FakePolicy("late")) as at:
        at.policy.gate.clear()
        client = Client(at.url, at.session.keys.model, timeout_s=0.2, retries=50)
        asking = asyncio.get_running_loop().run_in_executor(None, client.generate, [1])
        while not at.session.counts.coalesced:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)
        at.policy.gate.set()
        assert (await asking).token_ids == [*b"late", END]
        assert len(at.policy.prompts) == 1


def test_nothing_answers() -> None:
    with pytest.raises(OSError):
        Client("http://127.0.0.1:9", "k", timeout_s=1, retries=1).generate([1])


@pytest.mark.parametrize("body", ["<html>", "[]"])
def test_an_error_that_is_no_json(body: str) -> None:
    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(418)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(GatewayError) as error:
            Client(f"http://127.0.0.1:{server.server_port}", "k", retries=0).generate([1])
        thread.join()
    assert error.value.status == 418 and body in str(error.value)


def test_the_file_can_be_copied() -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level and (node.module or "").split(".")[0] in sys.stdlib_module_names
        elif isinstance(node, ast.Import):
            assert all(one.name.split(".")[0] in sys.stdlib_module_names for one in node.names)
