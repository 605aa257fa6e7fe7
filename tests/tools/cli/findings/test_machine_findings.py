# SPDX-License-Identifier: Apache-2.0
"""Every check of this machine: success, failure, and the remedy."""

from __future__ import annotations

import importlib.metadata
import resource
import shutil
import socket
from collections import namedtuple
from pathlib import Path

import pytest

from recipe.async_pipeline.tools.cli.findings import machine_findings as machine

UNLIMITED = resource.RLIM_INFINITY


def test_devices_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "null"):
        (tmp_path / name).touch()
    assert machine.count_nvidia_devices(tmp_path) == 2
    assert "2 GPUs" in machine.check_devices(2).detail
    assert "no GPU" in machine.check_devices(0).detail


@pytest.mark.parametrize(("free", "verdict"), [(8e9, "ok"), (1e6, "warn")])
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: float, verdict: str) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(free))
    assert machine.check_shared_memory(tmp_path).verdict == verdict
    assert machine.check_shared_memory(tmp_path / "none").verdict == "warn"


def test_what_a_run_needs_has_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    rows = {row.subject: row for row in machine.examine_machine()}
    assert rows["home"].verdict == "fail" and "must be a writable folder" in rows["home"].detail
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = {row.subject: row for row in machine.examine_machine()}
    assert rows["home"].verdict == "ok"
    assert {"user", "host name", "temporary folder", "open files", "shared memory"} <= rows.keys()


def test_whether_agents_have_a_sandbox() -> None:
    assert machine.check_sandbox("").verdict == "ok"
    found = machine.check_sandbox("unshare: Operation not permitted")
    assert found.verdict == "warn" and "unshare" in found.detail and "docs/agents.md" in found.remedy


def test_a_taken_port_is_a_warning() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        taken = machine.check_port(port, "Ray's head")
        assert taken.verdict == "warn" and str(port) in taken.detail
    assert machine.check_port(port, "Ray's head").verdict == "ok"


def test_flash_attention_matters_on_gpus_only() -> None:
    def version_of(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    unneeded = machine.check_flash_attention(0, version_of)
    assert (unneeded.verdict, unneeded.detail) == ("ok", "not needed: it runs on GPUs only")
    missing = machine.check_flash_attention(8, version_of)
    assert missing.verdict == "warn" and "trains with packed_sdpa" in missing.detail
    assert "attn_implementation" in missing.remedy
    found = machine.check_flash_attention(1, lambda name: "2.8.3")
    assert (found.verdict, found.detail) == ("ok", "flash-attn 2.8.3")


@pytest.mark.parametrize(
    ("soft", "hard", "verdict", "words"),
    [
        (65536, 65536, "ok", "limit 65536 (hard 65536)"),
        (UNLIMITED, UNLIMITED, "ok", "limit unlimited"),
        (1024, 1048576, "warn", "before `ray start`"),
        (1024, UNLIMITED, "warn", "hard unlimited"),
        (1024, 4096, "warn", "raise the hard limit to 8192"),
    ],
)
def test_open_files(soft: int, hard: int, verdict: str, words: str) -> None:
    found = machine.check_open_files(soft, hard)
    assert found.verdict == verdict and words in found.detail + found.remedy
