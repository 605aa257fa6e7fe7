# SPDX-License-Identifier: Apache-2.0
"""A client of the gateway for agents that work with tokens, with the standard library only: copy the file.

client = Client()                                  # OPENAI_BASE_URL and OPENAI_API_KEY are set
turn = client.generate([1, 2, 3], max_tokens=16)
turn.token_ids, turn.log_probs, turn.versions      # of each token
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """What the policy wrote."""

    token_ids: list[int]
    log_probs: list[float] | None
    versions: list[int]
    """The version of the weights that wrote each token."""
    finish: str
    """`stop`, or `length` if it was cut off."""


class GatewayError(RuntimeError):
    """The gateway refused a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Client:
    """Requests to one session."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout_s: float = 600.0,
        retries: int = 2,
    ) -> None:
        """`api_key`: the model key, or the control key for `reward`, `end` and `status`."""
        base = base_url or os.environ["OPENAI_BASE_URL"]
        self._base = base.rstrip("/").removesuffix("/v1")
        self._key = api_key or os.environ["OPENAI_API_KEY"]
        self._timeout_s, self._retries = timeout_s, retries

    def generate(
        self, prompt_ids: list[int], *, max_tokens: int | None = None, stop: list[str] | None = None
    ) -> Turn:
        """Have the policy continue a prompt. Raises GatewayError, and OSError if nothing answers."""
        body = {"prompt_ids": prompt_ids, "max_tokens": max_tokens, "stop": stop}
        return Turn(**self._call("/v1/generate", body))

    def reward(self, value: float) -> None:
        """Set the reward of the episode. Raises as `generate`."""
        self._call("/v1/session/reward", {"reward": value})

    def end(self, reason: str = "ended") -> None:
        """End the episode. Raises as `generate`."""
        self._call("/v1/session/end", {"reason": reason})

    def status(self) -> dict[str, Any]:
        """Return what happened in the session. Raises as `generate`."""
        found: dict[str, Any] = self._call("/v1/session", None)
        return found

    def _call(self, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(self._retries + 1):
            headers = {
                "Authorization": f"Bearer {self._key}",
                "Content-Type": "application/json",
                # A request that is sent again costs no second generation.
                "x-stainless-retry-count": str(attempt),
            }
            request = urllib.request.Request(self._base + path, data, headers)
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                raise GatewayError(error.code, _message(error.read())) from None
            except OSError:
                if attempt == self._retries:
                    raise
        raise AssertionError("unreachable")


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
