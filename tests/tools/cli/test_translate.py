# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline translate` prints what became of every key, and fails if one is unknown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.async_pipeline.cli import main

ROLL = Path(__file__).parents[1] / "translate" / "roll_rlvr.yaml"


def test_a_file_is_explained_key_by_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["translate", "roll", str(ROLL)]) == 0
    out = capsys.readouterr().out
    assert "  set            num_return_sequences_in_group=8  ->  actor_rollout_ref.rollout.n=8" in out
    assert "  nothing to do  is_num_return_sequences_expand=True  ->  the responses of a group" in out
    assert "  +async_generation_ratio=1" in out
    assert "not in the file, and needed:" in out


def test_the_overrides_alone_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["translate", "roll", str(ROLL), "--overrides"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "actor_rollout_ref.rollout.n=8" in lines and all("=" in line for line in lines)
    assert main.main(["translate", "roll", str(ROLL), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unknown"] == [] and found["overrides"]["actor_rollout_ref.rollout.n"] == 8


def test_an_unknown_key_gives_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("max_steps: 3\nwarp_factor: 9\n")
    assert main.main(["translate", "roll", str(file)]) == 1
    assert "1 of 2 keys are unknown: warp_factor" in capsys.readouterr().out
    assert main.main(["translate", "roll", str(file), "--overrides"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == ["+async_pipeline=true", "trainer.total_training_steps=3"]
    assert err == "async-pipeline translate: 1 of 2 keys are unknown: warp_factor\n"


def test_inputs_may_follow_the_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("max_steps: 3\n")
    assert main.main(["translate", "roll", str(file), "--overrides", "max_steps=7"]) == 0
    assert "trainer.total_training_steps=7" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1\n", "must be a mapping of keys"),
        ("a: [1\n", "cannot be read"),
        ("", "must have keys, got none"),
        ("# nothing\n", "must have keys, got none"),
    ],
)
def test_a_file_that_cannot_be_used_gives_status_2(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    assert main.main(["translate", "rllm", str(file)]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
    assert main.main(["translate", "rllm", str(tmp_path / "none.yaml")]) == 2


def test_overrides_change_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["translate", "roll", str(ROLL), "rollout_batch_size=32", "--overrides"]) == 0
    assert "data.train_batch_size=32" in capsys.readouterr().out.splitlines()
    assert main.main(["translate", "roll", "max_steps=7", "--overrides"]) == 0
    assert "trainer.total_training_steps=7" in capsys.readouterr().out.splitlines()


def test_several_files_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["translate", "roll", "a.yaml", "b.yaml"]) == 2
    assert "one FILE is translated, got a.yaml, b.yaml" in capsys.readouterr().err


def test_what_is_not_composed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("exp_name: ${nowhere}\nmax_steps: 3\n")
    assert main.main(["translate", "roll", str(file)]) == 0
    out = capsys.readouterr().out
    assert "not composed:\n  exp_name=${nowhere}: Interpolation key 'nowhere' not found" in out
    assert main.main(["translate", "roll", str(file), "--overrides"]) == 0
    out, err = capsys.readouterr()
    assert "trainer.total_training_steps=3" in out and "not composed: exp_name" in err
    assert main.main(["translate", "roll", str(file), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["not_composed"]) == 1


def test_a_value_that_is_wrong_gives_status_1_and_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("rollout_batch_size: -1\nmax_steps: 3\n")
    assert main.main(["translate", "roll", str(file)]) == 1
    out = capsys.readouterr().out
    assert "trainer.total_training_steps=3" in out
    assert "1 of 2 keys are unsupported: rollout_batch_size" in out
