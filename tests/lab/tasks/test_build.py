# SPDX-License-Identifier: Apache-2.0
"""The cache: made once per set of parameters, complete or absent, also after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.errors import WarmupFailed
from recipe.async_pipeline.lab.tasks.build import MARKER, REWARD_FILE, ToySpec, ensure_toy
from recipe.async_pipeline.lab.tasks.task import TaskSpec
from recipe.async_pipeline.lab.tasks.warmup import WarmupSpec
from tests import REPOSITORY


class Filler:
    """Fills a directory with one file and counts its calls."""

    def __init__(self, before_return: Callable[[], None] = lambda: None) -> None:
        self.calls: list[ToySpec] = []
        self.before_return = before_return

    def __call__(self, spec: ToySpec, work: Path, report: Callable[[str], None]) -> float:
        self.calls.append(spec)
        (work / "train.parquet").write_text("data")
        self.before_return()
        return 0.25


def make(root: Path, fill: Filler, spec: ToySpec | None = None) -> dict[str, str | float]:
    return ensure_toy(spec or ToySpec(), root, report=lambda _: None, fill=fill).as_dict()


def test_the_second_call_returns_the_finished_toy(tmp_path: Path) -> None:
    fill = Filler()
    first = make(tmp_path / "toy", fill)
    assert make(tmp_path / "toy", fill) == first
    assert len(fill.calls) == 1
    assert first["accuracy_after_warmup"] == 0.25
    assert Path(str(first["train"])).read_text() == "data"
    assert first["reward"] == str(REWARD_FILE)
    assert REWARD_FILE.is_file()


def test_making_is_announced_once(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        toy = ensure_toy(ToySpec(), tmp_path, report=said.append, fill=Filler())
    assert said == [f"making the model and the data of the task, once; later runs use {toy.dir}"]


def test_other_parameters_make_another_directory(tmp_path: Path) -> None:
    fill = Filler()
    specs = [
        ToySpec(),
        ToySpec(seed=1),
        ToySpec.of(seed=0, tied=False),
        ToySpec(task=TaskSpec(max_operand=98)),
        ToySpec(warmup=WarmupSpec(slip_rate=0.2)),
    ]
    assert len({make(tmp_path, fill, spec)["dir"] for spec in specs}) == len(specs)
    assert fill.calls == specs


def test_the_name_does_not_change_between_processes() -> None:
    assert ToySpec.of(seed=0, tied=True) == ToySpec()
    assert ToySpec().dir_name == ToySpec().dir_name
    assert ToySpec.of(seed=3, tied=False).dir_name.startswith("addition-untied-seed3-")


@pytest.mark.parametrize("marker", [None, "", '{"measured": {}}', '{"measured": {"seconds": 1'])
def test_an_incomplete_directory_is_made_again(tmp_path: Path, marker: str | None) -> None:
    half = tmp_path / ToySpec().dir_name
    half.mkdir()
    (half / "stale").write_text("half")
    if marker is not None:
        (half / MARKER).write_text(marker)
    fill = Filler()
    assert make(tmp_path, fill)["dir"] == str(half)
    assert len(fill.calls) == 1
    assert not (half / "stale").exists()


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail() -> None:
        raise WarmupFailed("too slow")

    with pytest.raises(WarmupFailed):
        make(tmp_path, Filler(fail))
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_makers_wins(tmp_path: Path) -> None:
    fast = Filler()
    made_by_fast: list[dict[str, str | float]] = []
    slow = Filler(lambda: made_by_fast.append(make(tmp_path, fast)))
    made_by_slow = make(tmp_path, slow)
    assert (len(fast.calls), len(slow.calls)) == (1, 1)
    assert [made_by_slow] == made_by_fast
    assert [path.name for path in tmp_path.iterdir()] == [ToySpec().dir_name]


def test_the_marker_holds_every_parameter(tmp_path: Path) -> None:
    made = Path(str(make(tmp_path, Filler())["dir"]))
    parameters: dict[str, Any] = json.loads((made / MARKER).read_text())["parameters"]
    assert parameters == ToySpec().parameters()
    assert parameters["warmup"]["slip_rate"] == WarmupSpec().slip_rate


def test_a_mixture_is_another_toy() -> None:
    dense, moe = ToySpec(), ToySpec.of(seed=0, tied=True, moe=True)
    assert moe.dir_name.startswith("addition-moe-tied-seed0-")
    assert "num_experts" not in dense.parameters()["model"], "dense toys keep their names"


@pytest.mark.e2e
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_real_toy_loads_and_is_sometimes_right(tied: bool) -> None:
    """The toys that whole jobs train: the first test that needs one makes it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shared = REPOSITORY / ".cache" / "toy"
    toy = ensure_toy(ToySpec.of(seed=0, tied=tied), shared, report=lambda line: None)
    assert 0.1 <= toy.measured.accuracy_after_warmup <= 0.6
    model = transformers.AutoModelForCausalLM.from_pretrained(toy.as_dict()["model"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(toy.as_dict()["model"])
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
