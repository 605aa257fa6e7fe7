# SPDX-License-Identifier: Apache-2.0
"""Pages of runs are served, renewed when a run has written, and others cannot read them."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession, CookieJar, web
from aiohttp.typedefs import Handler

from recipe.async_pipeline.tools.serve import app
from recipe.async_pipeline.tools.serve.app import RunServer, is_local
from tests import HANG_S
from tests.observe.run_folder import RecordedTrainer, write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "one", RecordedTrainer(max_lag=3, steps=4), strategy="fully_async")
    shutil.copytree(tmp_path / "runs" / "one", tmp_path / "runs" / "of" / "two")
    return tmp_path / "runs"


@asynccontextmanager
async def served(server: RunServer) -> AsyncIterator[str]:
    """Serve on a free port; yields the address."""
    runner = web.AppRunner(server.app())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_each_page(runs: Path) -> None:
    async with served(RunServer(runs)) as address, ClientSession() as session:

        async def page(path: str, status: int = 200) -> str:
            async with session.get(address + path) as answer:
                assert answer.status == status, path
                return await answer.text()

        listed = await page("/")
        assert 'href="run/one"' in listed and 'href="run/of/two"' in listed
        one = await page("/run/one")
        assert 'href="http' not in one and 'src="http' not in one
        assert "fully_async" in one and 'href="../"' in one and 'href="../episodes/one?step=4"' in one
        assert 'href="../../"' in await page("/run/of/two")
        assert "A against B" in await page("/compare?a=one&b=of/two")
        assert "ledger.jsonl does not exist" in await page("/episodes/one?step=4")
        for path in ("/run/three", "/run/../one", "/compare?a=one", "/run/%2e%2e%2fetc"):
            assert "<html" not in await page(path, 404)
        await page("/episodes/one?step=last", 400)
        async with session.post(address + "/run/one") as answer:
            assert answer.status == 405, "it only reads"


async def test_a_page_is_rendered_when_the_run_has_written_and_not_too_often(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(RunServer(runs)) as address, ClientSession() as session:

        async def tag(before: str = "") -> tuple[int, str]:
            async with session.get(address + "/run/one", headers={"If-None-Match": before}) as answer:
                return answer.status, answer.headers["ETag"]

        status, first = await tag()
        assert status == 200 and await tag(first) == (304, first)
        metrics = runs / "one" / "metrics.jsonl"
        rows = metrics.read_text().splitlines()
        metrics.write_text("\n".join([*rows, json.dumps({**json.loads(rows[-1]), "step": 5})]) + "\n")
        (runs / "one" / "summary.json").unlink()
        assert await tag(first) == (304, first), "it was rendered a moment ago"
        monkeypatch.setattr(app, "LEAST_S", 0.0)
        monkeypatch.setattr(app, "SPARED", 0.0)
        status, second = await tag(first)
        assert status == 200 and second != first


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", ""])
async def test_a_page_of_another_site_cannot_read_runs(runs: Path, host: str) -> None:
    async with served(RunServer(runs)) as address, ClientSession() as session:
        port = address.rpartition(":")[2]
        async with session.get(address, headers={"Host": f"{host}:{port}"}) as answer:
            assert answer.status == 403
        async with session.get(address) as answer:
            assert answer.status == 200
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


async def test_others_need_the_token(runs: Path) -> None:
    # Cookies of an address without a name count here only.
    async with (
        served(RunServer(runs, "secret")) as address,
        ClientSession(cookie_jar=CookieJar(unsafe=True)) as it,
    ):
        for path in ("/", "/?token=", "/?token=wrong", "/run/one"):
            async with it.get(address + path) as answer:
                assert answer.status == 403, path
        async with it.get(address + "/run/one?token=secret") as answer:
            assert (answer.status, str(answer.url)) == (200, address + "/run/one"), "not in the history"
        async with it.get(address + "/") as answer:
            assert answer.status == 200


def test_local_addresses() -> None:
    assert is_local("127.0.0.1") and is_local("::1") and is_local("localhost")
    assert not is_local("0.0.0.0") and not is_local("192.0.2.1") and not is_local("example.org")


async def test_a_run_that_has_written_nothing_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").touch()
    async with served(RunServer(tmp_path)) as address, ClientSession() as session:
        async with session.get(address + "/run/run") as answer:
            assert answer.status == 200
            assert "has neither events nor metrics of a run" in await answer.text()


@pytest.mark.parametrize("width", [1300, 500])
async def test_a_browser_renews_the_page_in_its_place(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium; `apt-get install chromium` has it")
    monkeypatch.setattr(app, "LEAST_S", 0.0)
    monkeypatch.setattr(app, "SPARED", 0.0)
    summary = runs / "one" / "summary.json"
    summary.unlink()
    asked = 0

    @web.middleware
    async def ends_when_asked_again(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal asked
        asked += request.path == "/run/one"
        if asked == 3:
            summary.write_text(json.dumps({"status": "failed", "error": "the end of it", "steps": 4}))
        return await handler(request)

    server = RunServer(runs)
    made = server.app()
    made.middlewares.append(ends_when_asked_again)
    monkeypatch.setattr(server, "app", lambda: made)
    async with served(server) as address:
        flags = (
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            f"--window-size={width},900",
        )
        dumped = await asyncio.to_thread(
            subprocess.run,
            [
                *(browser, *flags, f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=9000"),
                *("--dump-dom", f"{address}/run/one"),
            ],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=True,
        )
    assert asked > 2
    assert "The run failed." in dumped.stdout and "the run ended: the end of it" in dumped.stdout
    assert dumped.stdout.count('class="brush"') == 1, "the timeline of the new page has its zoom"
