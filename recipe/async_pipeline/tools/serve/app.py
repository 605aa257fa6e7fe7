# SPDX-License-Identifier: Apache-2.0
"""The server: read-only pages, each rendered in a thread when a run has written, and not too often.

A page is rendered again at most every `SPARED` times as long as that takes, so that all pages that are looked
at together cost about one hundredth of a core.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from ...errors import RunFilesError
from .pages import episodes_of, list_page, live_page, message_page, pair_page
from .run_list import find_runs, stamp_of, state_of

SPARED, LEAST_S = 100.0, 2.0
"""See above; and the shortest time between two renderings of a page, in seconds."""
LIST_S = 10.0
"""Time between two looks for runs."""
AGE_S = 30.0
"""A page that says how long ago a run has written is rendered again after this time."""
COOKIE = "async-pipeline"
LOCAL = ("localhost", "127.0.0.1", "[::1]")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@dataclass
class _Rendered:
    """The last rendering of a page."""

    stamp: Hashable = None
    text: str = ""
    tag: str = ""
    at: float = float("-inf")
    took_s: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class RunServer:
    """Pages of the runs at and below a folder."""

    def __init__(self, top: Path, token: str = "") -> None:
        """`token`: what an address must have once, for a server that others can reach."""
        self._top, self._token = top, token
        self._pages: dict[str, _Rendered] = {}
        self._runs: dict[str, Path] = {}
        self._looked = float("-inf")
        self.busy_s = 0.0
        """CPU seconds of all renderings."""

    def app(self) -> web.Application:
        """Return the application."""
        made = web.Application(middlewares=[self._guard])
        made.add_routes(
            [
                web.get("/", self._list),
                web.get("/run/{name:.+}", self._run),
                web.get("/episodes/{name:.+}", self._episodes),
                web.get("/compare", self._compare),
            ]
        )
        return made

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._token and (request.host or "").rpartition(":")[0] not in LOCAL:
            # A page of another site whose name leads here must not read the runs.
            raise web.HTTPForbidden(text="open the address that async-pipeline serve prints\n")
        if self._token:
            given = request.query.get("token", "")
            if self._is_token(given):
                rest = request.rel_url.without_query_params("token")
                answer = web.HTTPFound(rest)
                answer.set_cookie(COOKIE, given, httponly=True, samesite="Strict")
                raise answer
            if not self._is_token(request.cookies.get(COOKIE, "")):
                raise web.HTTPForbidden(
                    text="the address must end in ?token=...; async-pipeline serve prints it\n"
                )
        response = await handler(request)
        response.headers.update(HEADERS)
        return response

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    async def _list(self, request: web.Request) -> web.Response:
        def render() -> str:
            now = time.time()
            return list_page(self._top, {name: state_of(run, now) for name, run in self._known().items()})

        def stamp() -> Hashable:
            return tuple((name, stamp_of(run)) for name, run in self._known().items())

        return await self._answer(request, stamp, render)

    async def _run(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        run = await self._found(name)
        home = "../" * (name.count("/") + 1)
        return await self._answer(
            request, lambda: stamp_of(run), lambda: live_page(name, state_of(run, time.time()), home)
        )

    async def _compare(self, request: web.Request) -> web.Response:
        a, b = [await self._found(request.query.get(one, "")) for one in ("a", "b")]

        def render() -> str:
            now = time.time()
            return pair_page(state_of(a, now), state_of(b, now))

        return await self._answer(request, lambda: (stamp_of(a), stamp_of(b)), render)

    async def _episodes(self, request: web.Request) -> web.Response:
        run, step = await self._found(request.match_info["name"]), request.query.get("step")
        if step is not None and not step.isdecimal():
            raise web.HTTPBadRequest(text=f"step must be a number, got {step!r}\n")
        return await self._answer(
            request, lambda: step, lambda: episodes_of(run, None if step is None else int(step))
        )

    async def _found(self, name: str) -> Path:
        """Return a run by name. Only names of the list lead to a folder."""
        runs = await asyncio.to_thread(self._known)
        if name not in runs:
            raise web.HTTPNotFound(text=f"no run {name!r}; its name is one of the list\n")
        return runs[name]

    def _known(self) -> dict[str, Path]:
        if time.monotonic() - self._looked >= LIST_S:
            self._runs, self._looked = find_runs(self._top), time.monotonic()
        return self._runs

    async def _answer(
        self, request: web.Request, stamp: Callable[[], Hashable], render: Callable[[], str]
    ) -> web.Response:
        kept = self._pages.setdefault(request.path_qs, _Rendered())
        async with kept.lock:
            present, now = await asyncio.to_thread(stamp), time.monotonic()
            due = now - kept.at >= max(LEAST_S, SPARED * kept.took_s)
            if not kept.text or (due and (present != kept.stamp or now - kept.at >= AGE_S)):
                text, took_s = await asyncio.to_thread(_timed, render)
                self.busy_s += took_s
                kept.stamp, kept.text, kept.at, kept.took_s = present, text, now, took_s
                kept.tag = f'"{blake2b(text.encode(), digest_size=12).hexdigest()}"'
        if request.headers.get("If-None-Match") == kept.tag:
            return web.Response(status=304, headers={"ETag": kept.tag})
        return web.Response(text=kept.text, content_type="text/html", headers={"ETag": kept.tag})


def _timed(render: Callable[[], str]) -> tuple[str, float]:
    """Return a page, or one with the reason for its absence, and the CPU seconds that it took."""
    begun = time.thread_time()
    try:
        text = render()
    except RunFilesError as error:
        text = message_page(str(error))
    return text, time.thread_time() - begun


def is_local(host: str) -> bool:
    """Return whether only this machine reaches a server with this address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
