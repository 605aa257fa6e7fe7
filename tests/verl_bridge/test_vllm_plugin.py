# SPDX-License-Identifier: Apache-2.0
"""Only the engine core of a CPU run is told to fork."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from recipe.async_pipeline.verl_bridge.vllm_plugin import register

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


@pytest.mark.parametrize(
    ("platform", "process", "expected"),
    [
        ("cpu", "EngineCore", "fork"),
        ("cpu", "EngineCore_DP0", "fork"),
        ("cpu", "MainProcess", "spawn"),
        ("cuda", "EngineCore", "spawn"),
        ("", "EngineCore", "spawn"),
    ],
)
def test_who_forks(monkeypatch: pytest.MonkeyPatch, platform: str, process: str, expected: str) -> None:
    monkeypatch.setenv("VERL_PLATFORM", platform)
    monkeypatch.setenv(METHOD, "spawn")
    monkeypatch.setattr(multiprocessing.current_process(), "name", process)
    register()
    assert os.environ[METHOD] == expected
