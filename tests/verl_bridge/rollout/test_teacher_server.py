# SPDX-License-Identifier: Apache-2.0
"""A teacher behind HTTP says what verl's engines say, and a server that cannot is found before a run."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from recipe.async_pipeline.errors import RolloutError
from tests.conftest import Load

pytestmark = pytest.mark.real_engine

ROWS: list[dict[str, Any] | None] = [
    None,
    {
        "9": {"logprob": -4.0, "rank": 7, "decoded_token": "b"},
        "2": {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
        "1": {"logprob": -1.5, "rank": 2, "decoded_token": "d"},
    },
    {
        "1": {"logprob": -0.25, "rank": 1, "decoded_token": "d"},
        "9": {"logprob": -2.0, "rank": 2, "decoded_token": "b"},
    },
]
"""What vLLM says of a prompt of three tokens: of the likeliest two, and of the written one."""


class Server:
    """An OpenAI server. `replies`: status and body of further requests, the last of which is repeated."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, Any]] = [(200, {"choices": [{"prompt_logprobs": ROWS}]})]
        self.asked: list[tuple[str, Any, str | None]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(None, 200, {"data": [{"id": "big"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                reply = outer.replies[0] if len(outer.replies) == 1 else outer.replies.pop(0)
                self._reply(body, *reply)

            def _reply(self, body: Any, status: int, reply: Any) -> None:
                outer.asked.append((self.path, body, self.headers["Authorization"]))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(reply).encode())

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def module(load: Load, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found: ModuleType = load("recipe.async_pipeline.verl_bridge.rollout.teacher_server")
    monkeypatch.setattr(found, "FIRST_PAUSE_S", 0.0)
    return found


def ask(module: ModuleType, url: str, likely: int = 2, timeout_s: float = 60.0, **media: Any) -> Any:
    made = pickle.loads(pickle.dumps(module.TeacherServer(url, timeout_s)))

    async def main() -> Any:
        try:
            return await made.generate(
                "id", prompt_ids=[5, 9, 9], sampling_params={"prompt_logprobs": likely}, **media
            )
        finally:
            await made.close()

    return asyncio.run(main())


@pytest.mark.parametrize("likely", [2, 0])
def test_the_columns_are_the_ones_of_verls_engine(
    module: ModuleType, server: Server, load: Load, likely: int
) -> None:
    rows = ROWS if likely else [None, {"9": ROWS[1]["9"]}, {"9": ROWS[2]["9"]}]  # type: ignore[index]
    server.replies = [(200, {"choices": [{"prompt_logprobs": rows}]})]
    said = ask(module, server.url, likely).extra_fields
    assert server.asked[-1][:2] == (
        "/v1/completions",
        {"model": "big", "prompt": [5, 9, 9], "max_tokens": 1, "prompt_logprobs": likely},
    )

    of_vllm = [
        None if row is None else {token: SimpleNamespace(**one) for token, one in row.items()} for row in rows
    ]
    expected: dict[str, Any] = {}
    utils = load("verl.workers.rollout.vllm_rollout.utils")
    utils.extract_prompt_logprobs(SimpleNamespace(prompt_logprobs=of_vllm), likely, expected)
    assert said == expected


def test_a_busy_server_gets_the_request_again_with_the_key(
    module: ModuleType, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(module.API_KEY, "secret")
    server.replies = [(503, {}), (429, {}), *server.replies]
    assert len(ask(module, server.url).extra_fields["prompt_ids"]) == 3
    assert [path for path, _, _ in server.asked] == ["/v1/models", *["/v1/completions"] * 3]
    assert {key for _, _, key in server.asked} == {"Bearer secret"}


def test_what_the_server_refuses_is_not_asked_again(module: ModuleType, server: Server) -> None:
    server.replies = [(400, {"error": {"message": "too many\nlogprobs"}})]
    with pytest.raises(RolloutError, match="/v1 answered 400: too many logprobs$"):
        ask(module, server.url)
    assert len(server.asked) == 2
    with pytest.raises(RolloutError, match="/v1 takes no images, video or audio"):
        ask(module, server.url, image_data=[object()])


def test_a_server_that_is_gone_is_waited_for_until_the_deadline(module: ModuleType, server: Server) -> None:
    server.close()
    with pytest.raises(RolloutError, match=r"/v1 did not answer within 0.2 s: \w"):
        ask(module, server.url, timeout_s=0.2)


def tokenizer(text: Callable[[int], str]) -> Tokenizer:
    return Tokenizer(WordLevel({text(i): i for i in range(64)}, unk_token=text(0)))


def test_a_server_is_probed_with_tokens_of_the_policy(module: ModuleType, server: Server) -> None:
    """It must name the right text of most of them."""
    texts = {i: f"word{i}" for i in range(64)}
    ids = [2 * i for i in range(module.PROBED)]

    def says(named: dict[int, str]) -> None:
        rows = [{str(i): {"logprob": -1.0, "rank": 1, "decoded_token": f" {named[i]}"}} for i in ids]
        server.replies = [(200, {"choices": [{"prompt_logprobs": [None, *rows[1:]]}]})]

    says(texts | {2: "odd"})
    assert module.why_not(server.url, 0, tokenizer(texts.__getitem__)) == ""
    assert server.asked[-1][1]["prompt"] == ids
    says({i: f"other{i}" for i in range(64)})
    assert module.why_not(server.url, 0, tokenizer(texts.__getitem__)) == (
        "it has other tokens than the policy: 31 of 31 differ, e.g. 2, which is 'word2' here and "
        "'other2' there"
    )


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ((400, {"error": {"message": "no"}}), "it answered 400: no"),
        ((200, {"choices": [{"text": "hi"}]}), "answered without prompt_logprobs"),
        (
            (200, {"choices": [{"prompt_logprobs": ROWS[:2]}]}),
            "(too few tokens); teachers need vLLM",
        ),
    ],
)
def test_a_server_without_log_probs_of_prompts_is_no_teacher(
    module: ModuleType, server: Server, reply: tuple[int, Any], why: str
) -> None:
    server.replies = [reply]
    assert why in module.why_not(server.url, 3, tokenizer(str))


def test_a_server_that_does_not_answer_is_no_teacher(module: ModuleType, server: Server) -> None:
    server.close()
    assert module.why_not(server.url, 0, None).startswith("it does not answer: ")
