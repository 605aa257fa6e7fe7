# SPDX-License-Identifier: Apache-2.0
"""verl finds the plugin by its entry point, and the plugin changes only the CPU platform."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

from tests import REPOSITORY
from tests.conftest import Load


def test_the_entry_point_names_a_module_of_this_package() -> None:
    (point,) = [
        p for p in importlib.metadata.entry_points(group="verl.plugins") if p.name == "async_pipeline"
    ]
    assert point.value == "recipe.async_pipeline.verl_bridge.plugin"


@pytest.mark.real_engine
def test_importing_verl_loads_the_plugin(load: Load) -> None:
    load("verl")
    assert "recipe.async_pipeline.verl_bridge.plugin" in sys.modules
    load("recipe.async_pipeline.verl_bridge.process.after_import").require_loaded()


@pytest.mark.real_engine
@pytest.mark.parametrize(
    ("platform", "before", "after"),
    [
        ("cpu", None, "cuda"),
        (" CPU ", None, "cuda"),
        ("cpu", "npu", "npu"),
        ("cuda", None, None),
        (None, None, None),
    ],
)
def test_cuda_engines_are_used_on_the_cpu_platform_only(
    load: Load, monkeypatch: pytest.MonkeyPatch, platform: str | None, before: str | None, after: str | None
) -> None:
    plugin = load("recipe.async_pipeline.verl_bridge.plugin")
    for name, value in (("VERL_PLATFORM", platform), ("VERL_ENGINE_DEVICE", before)):
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    plugin.load()
    found = os.environ.get("VERL_ENGINE_DEVICE")
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    assert found == after


@pytest.mark.real_engine
def test_on_the_cpu_platform_a_process_without_an_engine_imports_none() -> None:
    code = (
        "import sys, verl.trainer.ppo.v1; print(*sorted({'vllm', 'sglang', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "VERL_PLATFORM": "cpu"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []


@pytest.mark.real_engine
def test_loading_twice_is_harmless(load: Load) -> None:
    plugin = load("recipe.async_pipeline.verl_bridge.plugin")
    registry = load("verl.plugin.platform.platform_manager").PlatformRegistry
    before = registry.get("cpu")
    plugin.load()
    assert registry.get("cpu") is before is not None
