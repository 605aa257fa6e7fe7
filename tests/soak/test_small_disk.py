# SPDX-License-Identifier: Apache-2.0
"""A disk that is full, and has room again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.soak.small_disk import empty, fill, small_disk


def test_a_full_disk_takes_nothing_until_it_is_emptied(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    with small_disk(tmp_path / "disk") as disk:
        fill(disk)
        with pytest.raises(OSError) as caught:
            (disk / "more").write_bytes(b"x" * 10_000)
        assert caught.value.errno == errno.ENOSPC
        empty(disk)
        (disk / "more").write_bytes(b"x" * 10_000)
    assert list((tmp_path / "disk").iterdir()) == [], "it is not mounted any more"


def test_who_may_not_mount_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bin"
    bad.mkdir()
    (bad / "mount").write_text("#!/bin/sh\necho must be superuser >&2\nexit 1\n")
    (bad / "mount").chmod(0o755)
    monkeypatch.setenv("PATH", str(bad))
    with (
        pytest.raises(ConfigError, match="mounting one failed .must be superuser.; be root, or leave it out"),
        small_disk(tmp_path / "disk"),
    ):
        pass
