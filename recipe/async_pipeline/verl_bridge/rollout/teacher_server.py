# SPDX-License-Identifier: Apache-2.0
"""A teacher that a server outside of this run serves: the log-probs of given tokens over HTTP.

The request is OpenAI's completion with a prompt of tokens and vLLM's parameter `prompt_logprobs`.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from ...errors import RolloutError

API_KEY = "ASYNC_PIPELINE_TEACHER_API_KEY"
"""The environment variable with the key for servers of teachers that want one."""
PROBED, PROBE_S = 32, 10.0
"""Tokens that are compared before a run starts, and the deadline of each request then."""
SAME = 0.75
"""Share of them that must have the same text, because servers write some in another way."""
BROKEN = "\ufffd"
"""What a tokenizer writes for a part of a character."""
PASSING = (408, 429, 500, 502, 503, 504)
"""Statuses of a server that may answer later."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Before a request is sent again; each pause is twice the one before."""


class TeacherServer:
    """What verl calls for the log-probs of one teacher, in place of its client."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """`url`: of the API, as in `http://host:8000/v1`. `timeout_s`: a request that fails, or meets a
        busy server, is sent again until so many seconds have passed.
        """
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        self._session: Any = None
        self._model = ""

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **media: Any
    ) -> Any:
        """Return verl's `TokenOutput` without tokens, and in its `extra_fields` numbers and log-probs of the
        prompt's tokens, each of shape (tokens, max(1, `prompt_logprobs`)), as verl's engines return them.

        Raises RolloutError if the server refuses the request, or does not answer in time.
        """
        from verl.workers.rollout.replica import TokenOutput

        if any(one is not None for one in media.values()):
            raise RolloutError(f"{self.url} takes no images, video or audio")
        likely = int(sampling_params["prompt_logprobs"])
        deadline, pause_s, why = asyncio.get_running_loop().time() + self._timeout_s, FIRST_PAUSE_S, ""
        while True:
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise RolloutError(f"{self.url} did not answer within {self._timeout_s:g} s: {why}")
            try:
                body = await asyncio.wait_for(self._ask(prompt_ids, likely), left_s)
                break
            except (OSError, asyncio.TimeoutError, _Later) as error:
                why = str(error) or type(error).__name__
            await asyncio.sleep(min(pause_s, max(0.0, deadline - asyncio.get_running_loop().time())))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        ids, log_probs = columns_of(body, likely, self.url)
        return TokenOutput(token_ids=[], extra_fields={"prompt_ids": ids, "prompt_logprobs": log_probs})

    async def close(self) -> None:
        """End the connections of this process."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, prompt_ids: Sequence[int], likely: int) -> Any:
        if not self._model:
            self._model = model_of(await self._send("GET", "/models"), self.url)
        return await self._send("POST", "/completions", request_of(self._model, prompt_ids, likely))

    async def _send(self, method: str, path: str, body: Any = None) -> Any:
        import aiohttp

        if self._session is None:
            # Deadlines are of whole requests, which wait in the server's queue.
            self._session = aiohttp.ClientSession(
                headers=headers(), timeout=aiohttp.ClientTimeout(total=None), trust_env=False
            )
        try:
            async with self._session.request(method, self.url + path, json=body) as answer:
                text = await answer.text()
        except aiohttp.ClientError as error:
            raise _Later(f"{type(error).__name__}: {error}") from error
        if answer.status in PASSING:
            raise _Later(f"status {answer.status}: {_message(text)}")
        if answer.status != 200:
            raise RolloutError(f"{self.url} answered {answer.status}: {_message(text)}")
        return json.loads(text)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_session": None}


class _Later(Exception):
    """The server may answer the same request later."""


def headers() -> dict[str, str]:
    """Return the headers of all requests."""
    key = os.environ.get(API_KEY)
    return {"Authorization": f"Bearer {key}"} if key else {}


def request_of(model: str, prompt_ids: Sequence[int], likely: int) -> dict[str, Any]:
    """Return the body of a request for the log-probs of a prompt's tokens, and of the `likely` at each."""
    return {"model": model, "prompt": list(prompt_ids), "max_tokens": 1, "prompt_logprobs": likely}


def model_of(body: Any, url: str) -> str:
    """Return the name of the model that a server serves. Raises RolloutError if it names none."""
    try:
        return str(body["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise RolloutError(f"{url}/models names no model; give the address of the API, with /v1") from None


def columns_of(body: Any, likely: int, url: str) -> tuple[list[list[int]], list[list[float]]]:
    """Return numbers and log-probs of tokens as verl has them: each row is for the next token of the prompt,
    and the last one is zeros. With `likely`, it has the likeliest tokens in their order.

    Raises RolloutError if the answer has none.
    """
    try:
        rows = [
            [(int(token), float(one["logprob"]), int(one["rank"])) for token, one in each.items()]
            for each in body["choices"][0]["prompt_logprobs"][1:]
        ]
        if likely:
            rows = [sorted((one for one in row if one[2] <= likely), key=lambda one: one[2]) for row in rows]
        if any(len(row) < max(1, likely) for row in rows):
            raise ValueError("too few tokens")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RolloutError(
            f"{url} answered without prompt_logprobs ({error}); teachers need vLLM's server"
        ) from None
    width = max(1, likely)
    return (
        [*([token for token, _, _ in row[:width]] for row in rows), [0] * width],
        [*([log_prob for _, log_prob, _ in row[:width]] for row in rows), [0.0] * width],
    )


def why_not(url: str, likely: int, tokenizer: Tokenizer | None) -> str:
    """Return why a server cannot be the teacher of a policy with this tokenizer, or nothing. Blocks."""
    url = url.rstrip("/")
    texts = {0: ""} if tokenizer is None else _texts(tokenizer)
    ids = list(texts)
    try:
        model = model_of(_get(f"{url}/models"), url)
        body = _get(f"{url}/completions", request_of(model, ids, likely))
        columns_of(body, likely, url)
    except RolloutError as error:
        return str(error)
    except urllib.error.HTTPError as error:
        return f"it answered {error.code}: {_message(error.read().decode(errors='replace'))}"
    except (OSError, ValueError) as error:
        return f"it does not answer: {error}"
    # The first one has no log-prob.
    said = zip(ids[1:], body["choices"][0]["prompt_logprobs"][1:], strict=True)
    there = {token: str(each[str(token)].get("decoded_token")).strip() for token, each in said}
    odd = [token for token, text in there.items() if text != texts[token]]
    if len(odd) <= (1 - SAME) * len(there):
        return ""
    return (
        f"it has other tokens than the policy: {len(odd)} of {len(there)} differ, e.g. {odd[0]}, which is "
        f"{texts[odd[0]]!r} here and {there[odd[0]]!r} there"
    )


def _texts(tokenizer: Tokenizer) -> dict[int, str]:
    """Return some tokens and their text, from all parts of the vocabulary."""
    size = tokenizer.get_vocab_size()
    every = ((i, tokenizer.decode([i], skip_special_tokens=False).strip()) for i in range(size))
    # Not parts of characters, which are written in several ways.
    plain = [(i, text) for i, text in every if text and text.isprintable() and BROKEN not in text]
    return dict(plain[i * len(plain) // PROBED] for i in range(PROBED))


def _get(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers()})
    # Not through a proxy, as later in the run.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=PROBE_S) as answer:
        return json.loads(answer.read())


def _message(text: str) -> str:
    """Return the message of an error as servers of OpenAI's API write it, or the beginning of the text."""
    try:
        body = json.loads(text)
        text = str(body.get("error", body).get("message", text))
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:300]
