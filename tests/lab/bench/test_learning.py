# SPDX-License-Identifier: Apache-2.0
"""Learning curves of runs, their table and their picture. Fake runs write files in the real format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.cli.main import main
from recipe.async_pipeline.lab.bench import learning
from recipe.async_pipeline.lab.bench.learning import VARIANTS, Curve, read_curve, table
from recipe.async_pipeline.lab.bench.runner import JobFailed


def write_run(folder: Path, rewards: list[float]) -> None:
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {"critic/score/mean": reward, "timing_s/step": 2.0, "async_pipeline/lag/mean": 1.5}
        for reward in rewards
    ]
    rows.insert(1, {"val-core/x": 0.5})
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": 1, "data": row}) + "\n" for row in rows)
    )
    (folder / "summary.json").write_text(
        json.dumps({"samples_trained": 128 * len(rewards), "steps": len(rewards), "lag_max": 2})
    )


def test_read_curve_reads_the_files_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    curve = read_curve(tmp_path / "run")
    assert curve.reward[0] == 0.1
    assert (curve.samples[-1], curve.seconds[-1], curve.lag_mean, curve.lag_max) == (1280, 20.0, 1.5, 2)
    assert curve.last_fifth == pytest.approx(0.95)


def test_every_variant_has_a_yardstick_at_the_same_learning_rate() -> None:
    rate = "actor_rollout_ref.actor.optim.lr"
    for variant in VARIANTS.values():
        yardstick = VARIANTS[variant.yardstick].overrides
        assert yardstick["async_strategy"] == "on_policy"
        assert yardstick.get(rate) == variant.overrides.get(rate)


def test_differences_are_paired_by_seed() -> None:
    def curve(seed: int, end: float) -> dict[str, Any]:
        return {"seed": seed, "last_fifth": end, "lag_mean": 1.0, "seconds": [100.0]}

    text = table(
        {
            "curves": {
                "on_policy": [curve(1, 0.5), curve(2, 0.6)],
                "one_step_off": [curve(2, 0.55), curve(3, 0.1)],
            }
        }
    )
    assert (
        "| `one_step_off` | 0.550, 0.100 | 0.325 | -0.050 [-0.050 .. -0.050] | 1.00 | 100 [100 .. 100] |"
        in text
    )
    assert "| `on_policy` | 0.500, 0.600 | 0.550 |  | 1.00 |" in text


@pytest.mark.slow
def test_the_command_writes_curves_failures_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake_run(name: str, seed: int, steps: int, directory: Path, task: Path) -> Curve:
        if (name, seed) == ("one_step_off", 2):
            raise JobFailed("status 1: RuntimeError: no")
        return Curve(
            [0.1 * seed] * steps, [8 * i for i in range(steps)], [float(i) for i in range(steps)], 0.5, 1
        )

    monkeypatch.setattr(learning, "run_variant", fake_run)
    monkeypatch.setattr(learning, "ensure_toy", lambda *args, **kwargs: type("Toy", (), {"dir": tmp_path}))
    out = tmp_path / "l.json"
    command = ["bench", "learning", "--variants", "on_policy,one_step_off", "--seeds", "2", "--steps", "6"]
    assert main([*command, "--json", str(out), "--logs", str(tmp_path / "logs")]) == 1
    data = json.loads(out.read_text())
    assert [len(curves) for curves in data["curves"].values()] == [2, 1]
    assert "one_step_off, seed 2" in capsys.readouterr().out
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_only_missing_curves_are_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[int, str]] = []

    def fake_run(name: str, seed: int, steps: int, directory: Path, task: Path) -> Curve:
        ran.append((seed, name))
        return Curve([0.1] * steps, [8] * steps, [1.0] * steps, 0.5, 1)

    monkeypatch.setattr(learning, "run_variant", fake_run)
    monkeypatch.setattr(learning, "ensure_toy", lambda *args, **kwargs: type("Toy", (), {"dir": tmp_path}))

    out = tmp_path / "l.json"
    command = ["bench", "learning", "--steps", "6", "--json", str(out)]
    assert main([*command, "--variants", "on_policy,one_step_off", "--seeds", "1"]) == 0
    ran.clear()
    assert main([*command, "--variants", "on_policy,n_step_ahead", "--seeds", "2", "--go-on"]) == 0
    assert ran == [(1, "n_step_ahead"), (2, "on_policy"), (2, "n_step_ahead")]
    curves = json.loads(out.read_text())["curves"]
    assert {name: [curve["seed"] for curve in runs] for name, runs in curves.items()} == {
        "on_policy": [1, 2],
        "one_step_off": [1],
        "n_step_ahead": [1, 2],
    }

    capsys.readouterr()
    for wrong, message in (
        (["--steps", "7"], "--steps must be 6, as in "),
        (["--json", str(tmp_path / "none.json")], "--go-on requires the --json file"),
    ):
        assert main([*command, *wrong, "--go-on"]) == 2
        assert message in capsys.readouterr().err
    out.write_text("[]")
    assert main([*command, "--go-on"]) == 2
    assert "was not written by this command" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--variants", "on_police"], ["--seeds", "0"], ["--steps", "1"]])
def test_invalid_options_are_rejected(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "learning", *options]) == 2
    assert "--variants must be of" in capsys.readouterr().err
