# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline serve` prints an address, serves until it is ended, and refuses in one line."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from recipe.async_pipeline.cli.main import main
from recipe.async_pipeline.console import EXIT_USERS
from tests.observe.run_folder import RecordedTrainer, write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "one", RecordedTrainer(max_lag=1, steps=3))
    return tmp_path / "runs"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_printed_address_shows_the_run(runs: Path, host: str) -> None:
    code = "import sys; from recipe.async_pipeline.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-uc", code, "serve", str(runs), "--port", "0", "--host", host]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            said, address = server.stdout.readline().split(": ", 1)
            assert said == "1 run" and ("?token=" in address) == (host == "0.0.0.0")
            address = address.strip().replace("0.0.0.0", "127.0.0.1")
            if "?" in address:
                with pytest.raises(HTTPError, match="403"):
                    urlopen(address.partition("?")[0])
            else:
                assert b"one_step_off" in urlopen(address).read()
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait() == 130


def test_what_cannot_be_served_is_one_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path / "none")]) == EXIT_USERS
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", str(runs), "--port", str(taken.getsockname()[1])]) == EXIT_USERS
    none, listen = capsys.readouterr().err.splitlines()
    assert "none is no folder; give a run directory" in none
    assert "cannot listen there: address already in use" in listen.lower()
