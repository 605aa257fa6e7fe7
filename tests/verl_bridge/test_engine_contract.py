# SPDX-License-Identifier: Apache-2.0
"""A run refuses an engine that lacks something that it uses, before Ray starts."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.contract import engines
from recipe.async_pipeline.contract.engines import Difference, EngineTree
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.patching import series
from recipe.async_pipeline.verl_bridge.engine_contract import check_engine
from tests import REPOSITORY
from tests.fakes.engine_differences import GONE, compare_as
from tests.verl_bridge.conftest import Smoke, refused

pytestmark = pytest.mark.real_engine

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
OTHER = EngineTree(name="vllm", folder=Path("nowhere"), version="0.99.0")


@pytest.fixture
def differs(monkeypatch: pytest.MonkeyPatch) -> list[Difference]:
    """Have another vLLM installed, with the differences of the returned list."""
    found: list[Difference] = []
    monkeypatch.setattr(engines, "installed", lambda: [OTHER])
    compare_as(monkeypatch, found)
    return found


def test_a_run_refuses_an_engine_that_breaks_the_contract(
    launch: ModuleType, smoke: Smoke, capsys: pytest.CaptureFixture[str], differs: list[Difference]
) -> None:
    differs += [GONE, dataclasses.replace(GONE, name="vllm:LLM")]
    line = refused(launch, smoke(), capsys)
    assert f"{ROLLOUT}.name=vllm" in line and "got 0.99.0: vllm.v1.request:Request.num_output_tokens" in line
    assert "is missing, which breaks version spans and 1 more; see `async-pipeline doctor --engine`" in line
    assert f"{OWN}.engine_check=warn" in line


def test_a_run_starts_with_a_warning_if_the_knob_asks(
    launch: ModuleType, smoke: Smoke, capsys: pytest.CaptureFixture[str], differs: list[Difference]
) -> None:
    differs.append(GONE)
    launch.prepare(smoke({f"{OWN}.engine_check": "warn"}))
    lines = capsys.readouterr().out.splitlines()
    (warning,) = [line for line in lines if "doctor --engine" in line]
    assert "vllm 0.99.0: vllm.v1.request:Request.num_output_tokens is missing" in warning


@pytest.mark.parametrize(
    ("breaks", "changes", "counts"),
    [
        (("LoRA",), {}, False),
        (("LoRA",), {f"{MODEL}.lora_rank": 8}, True),
        (("LoRA",), {f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": True}, False),
        (("fp8",), {}, False),
        (("fp8",), {f"{ROLLOUT}.quantization": "fp8"}, True),
        (("benchmarks",), {}, False),
        (("LoRA", "benchmarks", "fp8"), {}, False),
        (("LoRA", "weight load"), {}, True),
        (("pause",), {}, True),
    ],
)
def test_only_what_the_run_uses_counts(
    smoke: Smoke,
    differs: list[Difference],
    breaks: tuple[str, ...],
    changes: dict[str, object],
    counts: bool,
) -> None:
    differs.append(dataclasses.replace(GONE, breaks=breaks))
    assert (check_engine(smoke(changes), "warn") is not None) is counts


def test_the_tested_engine_and_one_that_is_not_installed_are_not_read(
    smoke: Smoke, differs: list[Difference], monkeypatch: pytest.MonkeyPatch
) -> None:
    differs.append(GONE)
    with pytest.raises(ConfigError):
        check_engine(smoke(), "refuse")
    assert check_engine(smoke({f"{ROLLOUT}.name": "sglang"}), "refuse") is None
    tested = engines.load(series.patches_dir())["vllm"].version
    monkeypatch.setattr(engines, "installed", lambda: [dataclasses.replace(OTHER, version=f"{tested}+cpu")])
    assert check_engine(smoke(), "refuse") is None


def test_the_check_imports_no_verl_by_itself() -> None:
    """Tests import it before verl has its plugin, which a process gets once."""
    code = f"import sys, {check_engine.__module__}; sys.exit('verl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=120).returncode == 0
