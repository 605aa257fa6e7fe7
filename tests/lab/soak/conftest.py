# SPDX-License-Identifier: Apache-2.0
"""A run directory whose events the tests write themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.soak_run import Run


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr("recipe.async_pipeline.lab.soak.job.POLL_S", 0.0)
    run = Run(tmp_path)
    yield run
    monkeypatch.undo()
    run.kill()
