# SPDX-License-Identifier: Apache-2.0
"""A run directory whose events the tests write themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.soak_run import Run


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("recipe.async_pipeline.lab.soak.job.POLL_S", 0.0)
    return Run(tmp_path)
