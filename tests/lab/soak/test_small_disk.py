# SPDX-License-Identifier: Apache-2.0
"""A small disk can be filled and emptied."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.soak.small_disk import empty, fill, small_disk


def test_a_full_disk_refuses_writes_until_it_is_emptied(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    with small_disk(tmp_path / "disk") as disk:
        fill(disk)
        with pytest.raises(OSError) as caught:
            (disk / "more").write_bytes(b"x" * 10_000)
        assert caught.value.errno == errno.ENOSPC
        empty(disk)
        (disk / "more").write_bytes(b"x" * 10_000)
    assert list((tmp_path / "disk").iterdir()) == [], "the disk is unmounted"


def test_a_failed_mount_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bin"
    bad.mkdir()
    (bad / "mount").write_text("#!/bin/sh\necho must be superuser >&2\nexit 1\n")
    (bad / "mount").chmod(0o755)
    monkeypatch.setenv("PATH", str(bad))
    with (
        pytest.raises(
            ConfigError, match="which failed .must be superuser.; run as root, or leave the fault out"
        ),
        small_disk(tmp_path / "disk"),
    ):
        pass
