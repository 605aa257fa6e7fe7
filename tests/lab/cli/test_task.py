# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline task make`: its options and its output."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.cli import task
from recipe.async_pipeline.lab.tasks.build import Spec, Toy, ToyMeasurements, ToySpec
from recipe.async_pipeline.lab.tasks.image_task.image_build import ImageSpec
from recipe.async_pipeline.lab.tasks.image_task.image_model import FluxModelSpec
from recipe.async_pipeline.lab.tasks.words_task.words_build import WordsSpec


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Spec, Path]]:
    """Replaces the making by a record of what was requested for."""
    calls: list[tuple[Spec, Path]] = []

    def ensure(spec: Spec, root: Path, *, report: Callable[[str], None], fill: object = None) -> Toy:
        calls.append((spec, root))
        report("working")
        return Toy(dir=root / "made", measured=ToyMeasurements(accuracy_after_warmup=0.25, seconds=1.5))

    monkeypatch.setattr(task, "ensure_toy", ensure)
    return calls


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    task.add_arguments(parser)
    return task.run(parser.parse_args(words))


def test_the_defaults(
    requested: list[tuple[Spec, Path]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("make") == 0
    root = tmp_path.resolve() / ".cache" / "toy"
    assert requested == [(ToySpec(), root)]
    captured = capsys.readouterr()
    assert captured.out == f"{root / 'made'}\n"
    assert captured.err == "working\n"


def test_every_option(
    requested: list[tuple[Spec, Path]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("make", "--dir", str(tmp_path), "--seed", "3", "--untied", "--json") == 0
    assert requested == [(ToySpec.of(seed=3, tied=False), tmp_path.resolve())]
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"dir", "model", "train", "val", "reward", "accuracy_after_warmup", "seconds"}
    assert printed["accuracy_after_warmup"] == 0.25
    assert Path(printed["reward"]).name == "reward.py"


def test_a_mixture_of_experts(requested: list[tuple[Spec, Path]], tmp_path: Path) -> None:
    assert run("make", "--dir", str(tmp_path), "--model", "moe") == 0
    assert requested == [(ToySpec.of(seed=0, tied=True, moe=True), tmp_path.resolve())]
    with pytest.raises(ConfigError, match="--model must be dense with --task lake, got moe"):
        run("make", "--task", "lake", "--model", "moe")


def test_a_pretrained_model(requested: list[tuple[Spec, Path]], tmp_path: Path) -> None:
    for words in ((), ("--model", "smollm2")):
        assert run("make", "--dir", str(tmp_path), "--task", "words", *words) == 0
    assert requested == [(WordsSpec(), tmp_path.resolve())] * 2
    for refused in (("--task", "words", "--model", "moe"), ("--model", "smollm2")):
        with pytest.raises(ConfigError, match="--model must be "):
            run("make", *refused)


def test_a_family_of_image_models(
    requested: list[tuple[Spec, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "find_spec", lambda name: name)
    for words in ((), ("--family", "sd3"), ("--family", "flux")):
        assert run("make", "--dir", str(tmp_path), "--task", "image", *words) == 0
    flux = ImageSpec(model=FluxModelSpec())
    assert [spec for spec, _ in requested] == [ImageSpec(), ImageSpec(), flux]
    with pytest.raises(ConfigError, match="--family must be left out with --task lake, got flux"):
        run("make", "--task", "lake", "--family", "flux")


@pytest.mark.parametrize("words", [(), ("make", "--tied", "--untied"), ("make", "--seed", "x")])
def test_a_wrong_call_is_a_usage_error(requested: list[tuple[Spec, Path]], words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*words)
    assert stopped.value.code == 2
    assert requested == []


def test_the_command_loads_without_the_heavy_libraries() -> None:
    program = (
        "import sys; import recipe.async_pipeline.lab.cli.task; "
        "sys.exit(bool({'torch', 'transformers', 'tokenizers', 'pyarrow'} & set(sys.modules)))"
    )
    root = Path(task.__file__).parents[4]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0


def test_the_lake(requested: list[tuple[object, Path]], tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    from recipe.async_pipeline.lab.tasks.lake_task.lake_build import LakeSpec
    from recipe.async_pipeline.lab.tasks.model import ModelSpec

    assert run("make", "--task", "lake", "--dir", str(tmp_path), "--untied", "--seed", "2") == 0
    assert requested == [(LakeSpec(seed=2, model=ModelSpec(tied=False)), tmp_path.resolve())]


def test_images(
    requested: list[tuple[object, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipe.async_pipeline.lab.tasks.image_task.image_build import ImageSpec

    monkeypatch.setattr(task, "find_spec", lambda name: name)
    assert run("make", "--task", "image", "--dir", str(tmp_path), "--seed", "2") == 0
    assert requested == [(ImageSpec(seed=2), tmp_path.resolve())]
    monkeypatch.setattr(task, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"--task image requires diffusers; pip install async_pipeline\[diff"
    ):
        run("make", "--task", "image")
