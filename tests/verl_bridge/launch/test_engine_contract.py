# SPDX-License-Identifier: Apache-2.0
"""A run refuses an engine that lacks something that it uses, before Ray starts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.installed.engines import EngineRelease, EngineTree, files_id
from recipe.async_pipeline.tools.contract import engines
from recipe.async_pipeline.tools.contract.engines import Difference
from recipe.async_pipeline.verl_bridge.launch import engine_contract
from recipe.async_pipeline.verl_bridge.launch.engine_contract import check_engine
from tests import HANG_S, REPOSITORY
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
    monkeypatch.setattr(engine_contract, "installed", lambda: [OTHER])
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


def test_an_engine_that_verl_cannot_start_is_refused_in_any_case(
    smoke: Smoke, differs: list[Difference]
) -> None:
    verls = dataclasses.replace(GONE, name="vllm:Arguments", breaks=(f"{engines.STARTS_IN_VERL} 0.9.1",))
    differs += [GONE, verls]
    with pytest.raises(ConfigError, match="vllm:Arguments is missing, which breaks start of a") as refusal:
        check_engine(smoke(), "warn")
    assert "engine_check" not in str(refusal.value), "no remedy that leads to the next refusal"


@pytest.mark.parametrize(
    ("breaks", "changes", "counts"),
    [
        (("LoRA",), {}, False),
        (("LoRA",), {f"{MODEL}.lora_rank": 8}, True),
        (("LoRA",), {f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": True}, False),
        (("replicas on several nodes",), {}, False),
        (("replicas on several nodes",), {f"{ROLLOUT}.tensor_model_parallel_size": 2}, True),
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


@pytest.mark.parametrize(
    ("breaks", "described", "counts"),
    [
        ("experts on a CPU", {"hidden_size": 8}, False),
        ("proof of experts", {"text_config": {"num_experts": 4}}, True),
        ("proof of latent attention", {"hidden_size": 8}, False),
        ("proof of latent attention", {"kv_lora_rank": 4}, True),
        ("proof of linear attention", {"hidden_size": 8}, False),
        ("proof of linear attention", {"text_config": {"linear_key_head_dim": 4}}, True),
        ("proof of linear attention", {"mamba_num_heads": 4}, True),
        ("proof of reordered weights", {"model_type": "llama"}, False),
        ("proof of reordered weights", {"model_type": "granitemoehybrid"}, True),
        ("proof of reordered weights", {"text_config": {"model_type": "llama4_text"}}, True),
    ],
)
def test_what_the_model_does_not_use_does_not_count(
    smoke: Smoke,
    differs: list[Difference],
    tmp_path: Path,
    breaks: str,
    described: dict[str, object],
    counts: bool,
) -> None:
    differs.append(dataclasses.replace(GONE, breaks=(breaks,)))
    (tmp_path / "task/model/config.json").write_text(json.dumps(described))
    assert (check_engine(smoke(), "warn") is not None) is counts
    if counts:
        with pytest.raises(ConfigError, match=breaks):
            check_engine(smoke(), "refuse")


def test_what_only_an_unknown_model_decides_about_is_a_warning(
    smoke: Smoke, differs: list[Difference]
) -> None:
    differs.append(dataclasses.replace(GONE, breaks=("experts on a CPU", "LoRA")))
    config = smoke({f"{MODEL}.path": "some/model"})
    warning = check_engine(config, "refuse")
    assert warning is not None
    assert "if the model needs that, whose config.json is not on this machine: some/model" in warning
    differs.append(GONE)
    with pytest.raises(ConfigError, match="version spans and 1 more"):
        check_engine(config, "refuse")


def test_the_tested_engine_and_one_that_is_not_installed_are_not_compared(
    smoke: Smoke, differs: list[Difference], monkeypatch: pytest.MonkeyPatch
) -> None:
    differs.append(GONE)
    with pytest.raises(ConfigError):
        check_engine(smoke(), "refuse")
    assert check_engine(smoke({f"{ROLLOUT}.name": "sglang"}), "refuse") is None
    tested = EngineRelease(engine="vllm", version="0.1", files=(), files_id=files_id(OTHER.folder, ()))
    monkeypatch.setattr(engine_contract, "recorded_release", lambda name: tested)
    assert check_engine(smoke(), "refuse") is None


def test_the_check_imports_no_verl_by_itself() -> None:
    """Tests import it before verl has its plugin, which a process gets once."""
    code = f"import sys, {check_engine.__module__}; sys.exit('verl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=HANG_S).returncode == 0
