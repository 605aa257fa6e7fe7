# SPDX-License-Identifier: Apache-2.0
"""An engine is checked with each model; a token of another version than recorded is a failure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.async_pipeline.lab.gpu_kit import engine_check
from recipe.async_pipeline.lab.gpu_kit.engine_check import VERSIONS, main, saying
from recipe.async_pipeline.lab.gpu_kit.verls_arguments import sglang_arguments, vllm_arguments
from recipe.async_pipeline.lab.job import with_cpu_settings
from recipe.async_pipeline.lab.tasks.untrained import main as save_untrained
from recipe.async_pipeline.tools.report.drawing.wording import ENGINE_LINE
from recipe.async_pipeline.verl_bridge.rollout.sglang.arguments import CPU_ARGUMENTS
from recipe.async_pipeline.verl_bridge.rules.expert_backends import ARGUMENT, KERNELS
from tests import HANG_S


def options(folder: Path, *models: str, engine: str = "vllm", ranks: int = 2) -> list[str]:
    chosen = ["--engine", engine, "--ranks", str(ranks), "--device", "cpu"]
    return [*models, *chosen, "--json", str(folder / "found.json")]


def found_in(folder: Path) -> Any:
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("wrong", "status"), [([], 0), (["8 tokens, runs [(1, 0)], recorded [(0, 0)]"], 1)])
def test_the_status_says_whether_all_responses_are_right(
    wrong: Sequence[str],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[tuple[str, str, int, str]] = []

    def check(*given: Any) -> dict[str, Any]:
        asked.append(given)
        _, model, *_ = given
        return {"attention": "one", "wrong": wrong if model == "/models/experts" else []}

    monkeypatch.setattr(engine_check, "check", check)
    assert main(options(tmp_path, "/models/qwen3", "/models/experts")) == status
    assert asked == [("vllm", "/models/qwen3", 2, "cpu"), ("vllm", "/models/experts", 2, "cpu")]
    assert list(found_in(tmp_path)["models"]) == ["qwen3", "experts"]
    assert capsys.readouterr().out == "".join(f"experts: {one}\n" for one in wrong)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_experts_are_served_by_the_kernels_of_a_run(engine: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 128}))
    assert engine_check.kernels(engine, "cuda", str(tmp_path)) == {ARGUMENT[engine]: KERNELS}
    assert engine_check.kernels(engine, "cpu", str(tmp_path)) == {}


def test_each_version_of_the_weights_says_another_token() -> None:
    weights = {
        "model.embed_tokens.weight": torch.randn(4, 2),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(2, 2),
        "model.layers.0.mlp.experts.0.down_proj.weight": torch.randn(2, 2),
        "lm_head.weight": torch.randn(4, 2),
    }
    said = saying(weights, 3)
    hidden = said["model.embed_tokens.weight"][1] + said["model.layers.0.mlp.experts.0.down_proj.weight"].sum(
        0
    )
    assert int((said["lm_head.weight"] @ hidden).argmax()) == 3
    assert not torch.equal(
        said["model.layers.0.self_attn.q_proj.weight"], weights["model.layers.0.self_attn.q_proj.weight"]
    )


VLLM_STARTS = """
import json, sys
from vllm.engine import arg_utils
from vllm.v1.engine.async_llm import AsyncLLM
from recipe.async_pipeline.lab.gpu_kit import engine_check
from recipe.async_pipeline.verl_bridge.rollout.vllm import engine, server

given = []
arg_utils.AsyncEngineArgs = lambda model, **more: given.append(more)
AsyncLLM.from_engine_args = engine.serve_versions = lambda made: None
for device in ("cuda", "cpu"):
    engine_check.Vllm(sys.argv[1], 2, device)
print("GIVEN", json.dumps(given, default=str))
"""


@pytest.mark.real_engine
def test_vllm_starts_as_in_a_run(tmp_path: Path) -> None:
    """In another process, which imports vLLM as a whole."""
    (tmp_path / "config.json").write_text("{}")
    command = with_cpu_settings([sys.executable, "-c", VLLM_STARTS, str(tmp_path)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for given, on_cpu in zip(json.loads(done.stdout.partition("GIVEN")[2]), (False, True), strict=True):
        assert given.items() >= json.loads(json.dumps(vllm_arguments(on_cpu=on_cpu), default=str)).items()
        assert given["scheduling_policy"] == "priority", "of this package"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_sglang_starts_as_in_a_run(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Engine:
        tokenizer_manager = None

        def __init__(self, **more: Any) -> None:
            given.update(more)

    own = "recipe.async_pipeline.verl_bridge.rollout.sglang.engine"
    modules: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.utils": {"TypeBasedDispatcher": list},
        "sglang.srt": {},
        "sglang.srt.entrypoints": {},
        "sglang.srt.entrypoints.engine": {"Engine": Engine},
        own: {"serve_versions": lambda manager, dispatcher: SimpleNamespace(versioned=None)},
    }
    for name, held in modules.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(held)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5.12")
    (tmp_path / "config.json").write_text("{}")
    engine_check.SGLang(str(tmp_path), 1, device)
    wanted = CPU_ARGUMENTS if device == "cpu" else sglang_arguments("0.5.12")
    assert given.items() >= wanted.items()


@pytest.mark.real_engine
@pytest.mark.nightly
@pytest.mark.parametrize(("engine", "attention"), [("vllm", "CPU_ATTN"), ("sglang", "torch_native")])
def test_versions_are_loaded_while_a_real_engine_answers(tmp_path: Path, engine: str, attention: str) -> None:
    """One rank; `verify_gpu.sh` takes two."""
    save_untrained([str(tmp_path), "qwen3"])
    checked = options(tmp_path, str(tmp_path / "qwen3"), engine=engine, ranks=1)
    command = with_cpu_settings([sys.executable, "-m", engine_check.__name__, *checked])
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (report,) = found_in(tmp_path)["models"].values()
    assert report["versions"] == VERSIONS and report["staged"] == VERSIONS // 2
    assert report["tensors_proved"] % VERSIONS == 0 < report["tensors_proved"]
    assert report["wrong"] == [] and report["responses_of_several_versions"]
    assert report["attention"] == attention
    assert [attention in line for line in ENGINE_LINE.findall(done.stdout)] == [True] * (engine == "vllm")
