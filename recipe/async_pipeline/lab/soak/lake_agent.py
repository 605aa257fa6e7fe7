# SPDX-License-Identifier: Apache-2.0
"""A program that plays FrozenLake over HTTP, and misbehaves in one episode in four on request.

    python -m recipe.async_pipeline.lab.soak.lake_agent CONTROL_FILE

It speaks OpenAI's chat API with the standard library, because a process for each episode would spend seconds
on the import of a client, and because it sends requests again when no client would. Such a request must get
the answer of the first one; another answer is a complaint (`misbehaviour.COMPLAINT`), which ends the soak.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import urllib.error
import urllib.request
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...agents.frozen_lake import FrozenLake
from ...console import echo
from .moods import ONE_IN, misbehave

RETRY = "retry"
"""The mood in which requests are sent again."""
LIMIT_S, GIVE_UP_S = 600.0, 0.1
"""Seconds for an answer, and for one that is given up."""
Messages = list[dict[str, Any]]


class PolicyChat:
    """A chat with the policy."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._url, self._key = f"{base_url}/chat/completions", api_key

    def ask(self, messages: Messages, attempt: int = 0) -> str:
        """Return the answer. `attempt`: how often the request was sent before. Raises HTTPError."""
        request = urllib.request.Request(self._url, *self._request(messages, attempt))
        with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
            text: str = json.load(reply)["choices"][0]["message"]["content"]
        return text

    def leave(self, messages: Messages) -> None:
        """Send a request, wait for a moment, and hang up."""
        place = urlsplit(self._url)
        connection = HTTPConnection(place.netloc, timeout=LIMIT_S)
        try:
            connection.request("POST", place.path, *self._request(messages, 0))
            time.sleep(GIVE_UP_S)
        finally:
            connection.close()

    def _request(self, messages: Messages, attempt: int) -> tuple[bytes, dict[str, str]]:
        headers = {
            "authorization": f"Bearer {self._key}",
            "content-type": "application/json",
            "x-stainless-retry-count": str(attempt),
        }
        return json.dumps({"model": "policy", "messages": messages}).encode(), headers


def play(task: dict[str, Any], policy: PolicyChat, control: Path, *, is_bad: bool) -> float:
    """Play one episode and return its reward. `is_bad`: do what the control file requests."""
    lake = FrozenLake(size=4, frozen=0.8)
    messages = [{"role": "user", "content": lake.reset(int(task["seed"]))}]
    reward = 0.0

    while True:
        retries = is_bad and len(messages) > 1 and misbehave(control) == RETRY
        try:
            text = insist(policy, messages, control) if retries else policy.ask(messages)
        except urllib.error.HTTPError as error:
            if error.code == 400:  # the turns are used up
                return reward
            raise
        step = lake.step(text)
        reward += step.reward
        if step.over:
            return reward
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": step.observation}]


def insist(policy: PolicyChat, messages: Messages, control: Path) -> str:
    """Return the answer to a request that is sent three times: given up, then answered, then sent again."""
    policy.leave(messages)
    answers = [policy.ask(messages, attempt) for attempt in (1, 2)]
    if answers[0] != answers[1]:
        text = f"a request that was sent again got {answers[1]!r} instead of {answers[0]!r}"
        Path(f"{control}.complaint").write_text(text, encoding="utf-8")
    Path(f"{control}.seen").touch()
    return answers[0]


def main() -> None:
    """Play the episode that the environment variables describe, and print its reward."""
    task = json.loads(Path(os.environ["ASYNC_PIPELINE_TASK"]).read_text(encoding="utf-8"))
    policy = PolicyChat(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    is_bad = random.randrange(ONE_IN) == 0
    echo(json.dumps({"reward": play(task, policy, Path(sys.argv[1]), is_bad=is_bad)}))


if __name__ == "__main__":
    main()
