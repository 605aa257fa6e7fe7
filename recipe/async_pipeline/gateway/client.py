# SPDX-License-Identifier: Apache-2.0
"""A client of the gateway for agents that work with tokens, and for external runners: copy the file.

It needs the standard library only.

client = Client()                                  # OPENAI_BASE_URL and OPENAI_API_KEY are set
turn = client.generate([1, 2, 3], max_tokens=16)
turn.token_ids, turn.log_probs, turn.versions      # of each token

while True:                                        # agentic.agent=external
    try:
        with claimed(runners_dir) as task:         # None: there was no task
            if task is not None:
                task.reward = play(task.shown, task.base_url, task.api_key)
    except Exception:                              # `claimed` has reported it
        logging.exception("an episode failed")
"""

from __future__ import annotations

import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
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

    def reward(self, value: float, turn: int | str | None = None) -> None:
        """Set the reward of a turn, by its number from 1 or the id of its answer, or else of the episode.

        Raises as `generate`.
        """
        self._call("/v1/session/reward", {"reward": value, "turn": turn})

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
                    text = answer.read()
                    return json.loads(text) if text else None
            except urllib.error.HTTPError as error:
                raise GatewayError(error.code, _message(error.read())) from None
            except OSError:
                if attempt == self._retries:
                    raise
        raise AssertionError("unreachable")


class ClaimedTask:
    """A task with its lease."""

    def __init__(self, url: str, found: dict[str, Any]) -> None:
        self.shown: dict[str, Any] = found["task"]
        """`messages`, `seed` and `task`, as a command finds them in its file."""
        self.base_url, self.api_key = self.shown.pop("base_url"), self.shown.pop("api_key")
        self.control_key: str | None = self.shown.pop("control_key", None)
        """The key for `Client.reward`, if the run gives it (agentic.gateway.agent_may_reward)."""
        self.unix_socket: str | None = self.shown.pop("unix_socket", None)
        """A Unix socket of the gateway, if it has one (agentic.gateway.unix_dir)."""
        self.reward: float | None = None
        self.lease_s: float = found["lease_s"]
        self._lease = Client(url, found["lease"])

    def renew(self) -> None:
        """Renew the lease. Raises GatewayError with the status 410 if it has ended."""
        self._lease._call("/v1/tasks/renew", {})

    def finish(self) -> None:
        """Report the reward. Raises as `renew`."""
        self._lease._call("/v1/tasks/finish", {"reward": self.reward})

    def fail(self, why: str) -> None:
        """Report that the task cannot be played. Raises as `renew`."""
        self._lease._call("/v1/tasks/fail", {"why": why})


def claim(runners_dir: str | os.PathLike[str], wait_s: float = 10.0) -> ClaimedTask | None:
    """Return a task of any gateway of the run, or None if none has one.

    `wait_s`: seconds that all gateways together are waited for. Raises GatewayError if it is too long.
    """
    files = sorted(Path(runners_dir).glob("gateway-*.json"))
    random.shuffle(files)
    if not files:
        time.sleep(wait_s)
    for file in files:
        try:
            at = json.loads(file.read_text())
            found = Client(at["url"], at["key"], retries=0)._call(
                "/v1/tasks/claim", {"wait_s": wait_s / len(files)}
            )
            if found is not None:
                return ClaimedTask(at["url"], found)
        except GatewayError as error:
            if error.status == 422:
                raise
            time.sleep(wait_s / len(files))
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
            # That gateway is gone, and something else may listen there.
            time.sleep(wait_s / len(files))
    return None


@contextmanager
def claimed(runners_dir: str | os.PathLike[str], wait_s: float = 10.0) -> Iterator[ClaimedTask | None]:
    """Claim a task, renew its lease while the body plays it, and report its end. Raises as `claim`.

    An error of the body is reported and raised. The end of a task whose lease has ended is not reported.
    """
    task = claim(runners_dir, wait_s)
    if task is None:
        yield None
        return
    over = threading.Event()
    renewing = threading.Thread(target=_renew, args=(task, over), daemon=True)
    renewing.start()
    try:
        yield task
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
        _report(lambda: task.fail(why))
        raise
    else:
        _report(task.finish)
    finally:
        over.set()
        renewing.join()


def _renew(task: ClaimedTask, over: threading.Event) -> None:
    while not over.wait(task.lease_s / 3):
        try:
            task.renew()
        except GatewayError:
            return
        except OSError:
            continue


def _report(end: Callable[[], None]) -> None:
    try:
        end()
    except GatewayError as error:
        if error.status != 410:
            raise


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
