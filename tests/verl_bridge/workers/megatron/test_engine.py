# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron engine on the CPU agrees with transformers in every layout, exactly and after a step.

`layouts.py` runs the ones of a tier once; each test here looks at what one of them measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import REPOSITORY
from tests.verl_bridge.workers.megatron.layouts import ENVIRONMENT, LAYOUTS, LENGTHS
from tests.verl_bridge.workers.megatron.replays import LAYOUTS as REPLAYS
from tests.verl_bridge.workers.megatron.values import LAYOUTS as VALUES

pytestmark = [
    pytest.mark.real_engine,
    pytest.mark.skipif(find_spec("megatron") is None, reason="no megatron"),
]
LIMIT_S = 1800.0
"""Most of it for cores that others use too; see CONTRIBUTING.md for the time on idle ones."""
EXACT = 2e-6
"""Largest difference of log-probs between two implementations in float32."""
STEP = 1e-3
"""The learning rate: what AdamW moves a weight in its first step."""
KNOWN = LAYOUTS | REPLAYS | VALUES
SLOW = {
    *("dense-dp2", "dense-tp2-without-sequence-parallel", "dense-pp2", "tied-tp2", "moe", "moe-tp2-etp2"),
    *("replay-ep2", "values-tp2", "values-ep2"),
}
"""Layouts of the nightly tests: each way to split a model is in another one, too."""
FolderOf = Callable[[str], Path]


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.nightly] * (name in SLOW)) for name in names]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Return the function that has the folder of what a layout measured; it runs all of the same tier."""
    run = cache(partial(run_layouts, tmp_path_factory))
    return lambda name: run(tuple(other for other in KNOWN if (other in SLOW) == (name in SLOW)))


def run_layouts(tmp_path_factory: pytest.TempPathFactory, names: tuple[str, ...]) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    done = subprocess.run(
        [sys.executable, "-m", "tests.verl_bridge.workers.megatron.layouts", str(folder), *names],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    (folder / "output.txt").write_text(done.stdout, encoding="utf-8")
    return folder


@pytest.fixture(params=marked(LAYOUTS))
def ranks(folder_of: FolderOf, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return what each rank of a layout measured. Fails with the traceback of a rank that failed."""
    return read(folder_of, request.param)


def read(folder_of: FolderOf, name: str) -> list[dict[str, Any]]:
    folder = folder_of(name)
    for error in sorted(folder.glob(f"{name}.*.error")):
        pytest.fail(error.read_text(encoding="utf-8"))
    files = [folder / f"{name}.{rank}.json" for rank in range(KNOWN[name].ranks)]
    if not all(file.is_file() for file in files):
        pytest.fail(f"{name} did not end:\n{(folder / 'output.txt').read_text(encoding='utf-8')[-4000:]}")
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@pytest.fixture
def upstream(folder_of: FolderOf) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder_of("dense") / "upstream.json").read_text(encoding="utf-8"))
    return found


def test_outputs_equal_the_ones_of_transformers(ranks: list[dict[str, Any]]) -> None:
    outputs = [rank["before"] for rank in ranks if rank["outputs"]]
    assert outputs, "some rank has the outputs"
    for apart in outputs:
        assert apart["log_probs"] < EXACT and apart["entropy"] < 3 * EXACT


def test_the_export_is_the_file_bit_by_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["names"] == rank["different"] == []


def test_a_step_has_the_gradient_norm_and_the_weights_of_adamw(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        if rank["outputs"]:
            ours, theirs = rank["grad_norm"]
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert rank["moved"] > 0.9 * STEP, "the step did something"
        assert rank["apart"] < 0.05 * STEP


def test_the_parts_of_all_ranks_are_the_export(ranks: list[dict[str, Any]]) -> None:
    """Each element is in one part, and the parts are views of the parameters."""
    for rank in ranks:
        gather = rank["gather"]
        assert gather["names"] == gather["different"] == gather["not_once"] == gather["wrong_replica"] == []
        assert gather["ordered"] and gather["aliases"]


def test_all_ranks_assemble_if_one_cannot_publish_parts(folder_of: FolderOf) -> None:
    assert all(rank["gather"]["falls_back"] for rank in read(folder_of, "moe-tp2-ep2"))
    output = (folder_of("moe-tp2-ep2") / "output.txt").read_text(encoding="utf-8")
    assert "weights are assembled before each publication: a tensor is computed" in output


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.resumes])
def test_a_resumed_step_repeats_the_undisturbed_one(folder_of: FolderOf, name: str) -> None:
    for rank in read(folder_of, name):
        assert rank["restored"] and rank["trained"]
        assert rank["repeated"], "weights after a load and a step, bit by bit"
        assert rank["shared_steps"], "megatron-core keeps a step for each parameter now: drop the repair"
        assert rank["refused"], "megatron-core loads into a new optimizer now: drop the repair"


def test_other_processes_do_not_import_megatron(upstream: dict[str, Any]) -> None:
    assert upstream["postponed"], "importing verl's plugin and engines imported megatron.core"
    assert not upstream["stand_in_left"], "the stand-in for Transformer Engine outlived the import"
    assert not upstream["cuda"], "the shim must not claim CUDA"


def test_every_hole_is_still_open_upstream_and_filled_here(upstream: dict[str, Any]) -> None:
    """A hole that an upgrade has closed fails this test: drop it from `standin.HOLES`."""
    assert upstream["open"] == ["te_general_gemm", "maybe_move_tensor_to_cpu", "scatter_to_tp_ranks"]
    assert upstream["still_open"] == []


def test_the_bridge_still_loses_the_rotary_base(upstream: dict[str, Any]) -> None:
    """Once it reads 500000, `workers/megatron/config.py:set_rotary_base` is not needed."""
    assert upstream["rotary_base"] == 10000


@pytest.mark.parametrize("name", marked(REPLAYS))
def test_recorded_routing_is_replayed_after_the_routers_changed(folder_of: FolderOf, name: str) -> None:
    """Outputs and gradients are the ones of transformers whose routers choose the recorded experts."""
    ranks = read(folder_of, name)
    for rank in ranks:
        accepted, *refused, lost = rank["refused"]
        assert accepted == "" and all("got no recorded routing" in why for why in refused)
        assert "1 routers of the actor would choose by themselves" in lost
        assert rank["recorded"] == [True] * len(LENGTHS), (
            "transformers chooses the same experts before the change"
        )
        assert rank["kept"] < 0.9, "the changed routers choose other experts"
    outputs = [rank for rank in ranks if rank["outputs"]]
    assert outputs, "some rank has the outputs"
    for rank in outputs:
        assert rank["replayed"] < EXACT
        assert rank["native"] > 1000 * EXACT, "without a replay the outputs differ"
        ours, theirs = rank["grad_norm"]
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("name", marked(VALUES))
def test_a_critic_equals_transformers_layers_with_its_head(folder_of: FolderOf, name: str) -> None:
    """Values before and after a step, and the gradient norm; ranks that hold the head hold the same one."""
    ranks = read(folder_of, name)
    assert all(rank["heads"] for rank in ranks)
    outputs = [rank for rank in ranks if rank["outputs"]]
    assert outputs, "some rank has the outputs"
    for rank in outputs:
        assert rank["before"] < EXACT
        ours, theirs = rank["grad_norm"]
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert rank["after"] < 2e-4 < 0.01 * rank["moved"], "the step did the same, and something"
