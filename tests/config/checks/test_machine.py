# SPDX-License-Identifier: Apache-2.0
"""A container in which no run could start is refused with a line for each need, before Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.async_pipeline.config.checks.machine import driver
from tests import REPOSITORY
from tests.fakes.private_mounts import may_unshare

CHECK = """\
import json, os
from recipe.async_pipeline.config.checks.machine import require_machine
from recipe.async_pipeline.errors import ConfigError
try:
    store_bytes = int(os.environ["STORE_BYTES"])
    found = require_machine(needed_shm_bytes=None, store_bytes=store_bytes, temporary=None)
    print(json.dumps(["starts", *found]))
except ConfigError as error:
    print(json.dumps(["refused", *error.problems]))
"""


def found(*inside: str, **environment: str | None) -> list[str]:
    """Return what a process reports: whether a run starts, and the lines. `inside`: what starts it."""
    variables = {"TMPDIR": None, "RAY_TMPDIR": None, "STORE_BYTES": "0", **environment}
    result = subprocess.run(
        [*inside, sys.executable, "-c", CHECK],
        env={
            **{name: value for name, value in os.environ.items() if name not in variables},
            **{name: value for name, value in variables.items() if value is not None},
        },
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    lines: list[str] = json.loads(result.stdout)
    return lines


def test_a_home_that_takes_no_files(tmp_path: Path) -> None:
    status, line = found(HOME=str(tmp_path / "none"))
    assert status == "refused"
    assert line.startswith(
        f"HOME must be a writable folder, got {tmp_path}/none (No such file or directory);"
    )
    assert found(HOME=str(tmp_path))[0] == "starts"


def test_a_sample_store_that_may_exceed_the_memory_is_a_warning() -> None:
    assert found(STORE_BYTES=str(1 << 20)) == found()
    status, *warnings = found(STORE_BYTES=str(1 << 50))
    assert status == "starts"
    assert any("the sample store may hold up to 1125899.9 GB if all" in line for line in warnings)


def test_a_temporary_folder_that_is_too_long_for_sockets_or_not_there(tmp_path: Path) -> None:
    long = "/tmp/" + "x" * 95
    status, line = found(TMPDIR=long)
    assert status == "refused" and line.startswith("TMPDIR must have at most 39 bytes, got 100: /tmp/xxx")
    status, line = found(TMPDIR=long, RAY_TMPDIR="/tmp")
    assert status == "refused" and line.startswith("TMPDIR must have at most 70 bytes, got 100: /tmp/xxx")
    assert found(TMPDIR="/tmp/" + "x" * 60, RAY_TMPDIR="/tmp")[0] == "starts"
    assert found(TMPDIR="/dev/null/x")[1].startswith("TMPDIR must be a writable folder, got /dev/null/x (")


def test_few_open_files() -> None:
    status, line = found("bash", "-c", 'ulimit -n 256; exec "$0" "$@"')
    assert status == "refused"
    assert line.startswith("the hard limit on open files must be at least 1024, got 256; raise it: ")


needs_namespaces = pytest.mark.skipif(not may_unshare(), reason="no new namespaces")


@needs_namespaces
def test_the_shared_memory_of_a_container() -> None:
    small = 'mount -t tmpfs -o size=64m tmpfs /dev/shm; exec "$0" "$@"'
    status, line = found("unshare", "-m", "bash", "-c", small)
    assert status == "refused"
    assert line.startswith("/dev/shm must have 0.13 GB free, got 0.07; start the container with a larger")


@needs_namespaces
def test_a_host_name_without_an_address_is_a_warning() -> None:
    status, *lines = found("unshare", "-u", "bash", "-c", 'hostname no-such-host; exec "$0" "$@"')
    assert status == "starts"
    assert [line for line in lines if line.startswith("WARNING: the host name no-such-host must have an ad")]


@needs_namespaces
def test_a_user_without_a_name_is_a_warning(tmp_path: Path) -> None:
    names = dict.fromkeys(("USER", "LOGNAME", "LNAME", "USERNAME"))
    command = ("unshare", "-U", "--map-user=12345")
    status, *lines = found(*command, HOME="/tmp", **names)
    assert status == "starts"
    assert any(line.startswith("WARNING: uid 12345 must have a name, got none in /etc/pas") for line in lines)
    assert not any("uid" in line for line in found(*command, HOME="/tmp", **{**names, "USER": "me"}))


@pytest.mark.parametrize(
    ("version", "cuda", "remedy"),
    [("535.161.08", "12.8", ""), ("470.57.02", "12.8", "update it"), ("570.86", "13.0", "update it")],
)
def test_a_driver_that_is_too_old_for_torch_is_a_warning(
    tmp_path: Path, version: str, cuda: str, remedy: str
) -> None:
    file = tmp_path / "version"
    assert driver(file, cuda).remedy == ""
    for kind in ("NVIDIA UNIX x86_64 Kernel Module", "NVIDIA UNIX Open Kernel Module for x86_64"):
        file.write_text(f"NVRM version: {kind}  {version}  Mon\nGCC version:  gcc version 12.3.0\n")
        state = driver(file, cuda)
        assert state.remedy.partition(",")[0] == remedy and (not remedy or not state.fatal)
        assert not driver(file, "").remedy, "a torch for CPUs"
        assert "not compared with CUDA 99.0" in str(driver(file, "99.0"))


def test_everything_that_is_lacking_is_named_at_once() -> None:
    status, *lines = found(HOME="/dev/null", TMPDIR="/tmp/" + "x" * 95)
    assert status == "refused" and [line.split()[0] for line in lines] == ["HOME", "TMPDIR"]
