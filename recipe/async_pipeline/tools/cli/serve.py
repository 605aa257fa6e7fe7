# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline serve RUN|FOLDER`: watch runs in a browser."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from ...console import echo
from ...errors import ConfigError, RunFilesError

if TYPE_CHECKING:
    from ..serve.app import RunServer

PORT = 8266
"""Next to the one of Ray's dashboard."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline serve`."""
    parser.add_argument(
        "folder", type=Path, metavar="RUN|FOLDER", help="a run directory, or a folder with runs below it"
    )
    parser.add_argument("--port", type=int, default=PORT, help="0: any free one (default: %(default)s)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at (default: %(default)s); at another than a loopback address the printed "
        "address has a token that it cannot be read without",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C. Raises RunFilesError without a run, ConfigError if it cannot listen there."""
    from ..serve.app import RunServer, is_local
    from ..serve.run_list import find_runs

    if not args.folder.is_dir():
        raise RunFilesError(
            f"{args.folder} is no folder; give a run directory, or a folder with runs below it"
        )
    names = [*find_runs(args.folder)]
    token = "" if is_local(args.host) else secrets.token_urlsafe(16)
    asyncio.run(_serve(RunServer(args.folder, token), args.host, args.port, token, names))
    return 0


async def _serve(server: RunServer, host: str, port: int, token: str, names: list[str]) -> None:
    from aiohttp import web

    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"--host {host} --port {port}: cannot listen there: {_reason(error)}; give "
                "another, or --port 0 for any free one"
            ) from None
        address = f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}/"
        # A single run is what its reader came for.
        page = f"run/{names[0]}" if len(names) == 1 else ""
        query = f"?token={token}" if token else ""
        echo(f"{len(names)} run{'s' if len(names) > 1 else ''}: {address}{page}{query}")
        echo("Ctrl-C ends the server; runs do not notice")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _reason(error: OSError) -> str:
    """Return the text of the system; asyncio writes the address into its errors."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
