# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline plan`."""

from __future__ import annotations

import functools
import json
import shlex
from pathlib import Path

import msgspec
import pytest

from recipe.async_pipeline.cli import main
from recipe.async_pipeline.console import EXIT_USERS
from recipe.async_pipeline.tools.cli import plan
from recipe.async_pipeline.tools.plan import search
from recipe.async_pipeline.tools.plan.profile import dump
from tests.tools.plan.workloads import LONG_TAIL, TRAINING

search_once = functools.cache(search.plan)


@pytest.fixture(autouse=True)
def planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache the search: it takes seconds, and these tests check how its result is printed."""
    monkeypatch.setattr(plan, "plan", search_once)


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "p.yaml"
    file.write_text(dump(LONG_TAIL))
    return str(file)


def planned(path: str, *more: str) -> list[str]:
    return ["plan", "--profile", path, "--devices", "16", "--max-lag", "2", "--seeds", "3", *more]


@pytest.mark.slow
def test_json_keys(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(planned(path, "--json")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts) == ["recommendation", "predicted", "alternatives", "verdict", "why", "explanation"]
    assert facts["verdict"] == "async"
    keys = {"strategy", "max_lag", "depth", "shape", "pools", "idle_devices", "groups"}
    assert set(facts["recommendation"]) == keys
    low, high = facts["predicted"]["interval"]
    assert low <= facts["predicted"]["speedup_vs_sync"] <= high
    assert facts["predicted"]["lag"]["max"] <= 2
    assert facts["alternatives"]


@pytest.mark.slow
def test_text_has_a_verdict_and_a_table(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(planned(path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("async: ")
    assert lines[2].startswith("the best synchronous layout takes ")
    assert lines[5].split()[:3] == ["strategy", "max_lag", "depth"]


@pytest.mark.slow
def test_a_training_bound_profile_gets_the_verdict_sync(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(dump(TRAINING))
    assert main.main(planned(str(file), "--json")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["verdict"] == "sync"
    assert facts["recommendation"] == {"strategy": "sync", "devices": 16}
    assert facts["alternatives"][0]["speedup_vs_sync"] == pytest.approx(
        facts["predicted"]["step_s"] / facts["alternatives"][0]["step_s"], rel=0.02
    )


@pytest.mark.slow
def test_without_lag_the_reason_is_the_lag(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(planned(path, "--max-lag", "0")) == 0
    assert (
        "with max_lag 0 a batch is generated only after the previous one is trained"
        in capsys.readouterr().out
    )


@pytest.mark.real_engine
@pytest.mark.parametrize(("devices", "replica"), [(16, 1), (25, 16)])
def test_applied_overrides_are_accepted_by_explain(
    tmp_path: Path, devices: int, replica: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 25 devices, a replica takes two nodes, and one device stays idle."""
    file = tmp_path / "p.yaml"
    file.write_text(dump(msgspec.structs.replace(LONG_TAIL, devices_per_replica=replica)))
    assert main.main(planned(str(file), "--devices", f"{devices}", "--apply")) == 0
    printed = capsys.readouterr().out
    assert not printed.rstrip().endswith("\\")
    overrides = shlex.split(printed.replace("\\\n", " "))
    own = [
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.model.path=/nowhere",
        f"+ray_kwargs.ray_init.num_gpus={devices}",
    ]
    assert (
        main.main(
            [
                "explain",
                "--json",
                *overrides,
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.actor.strategy=fsdp2",
                *own,
            ]
        )
        == 0
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "1"], "--devices must be >= 2"),
        (["--seeds", "2"], "--seeds must be >= 3"),
        (["--max-lag", "-1"], "--max-lag must be >= 0"),
        (["--seed", "-1"], "--seed must be >= 0"),
        (["--seeds", "11"], "--seeds must be at most 10"),
        (["--max-lag", "1001"], "--max-lag must be at most 1000"),
        (["--devices", "1000000"], "--devices must be at most 65536"),
        (["--devices", "65536"], "12582912 turns of responses, 12 steps (max_lag 2) of 1048576, but at most"),
        (["--profile", "."], "is a directory; make a profile of a run with async-pipeline profile"),
    ],
)
def test_a_user_error_is_one_line(
    path: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*planned(path), *arguments]) == EXIT_USERS
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_progress_is_also_shown_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    search.plan(TRAINING, 4, max_lag=0, seeds=3, say=said.append)
    assert said[0].endswith(" candidates for 4 devices") and said[1].startswith("simulating candidate 1 of ")
    assert said[-2].startswith("simulating ") and "finalists" in said[-2] and said[-1] == ""
    for text in said:
        plan.show_progress(text)
    assert capsys.readouterr().err.splitlines() == said[:-1]


@pytest.mark.slow
def test_every_column_of_the_table_is_explained(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(planned(path)) == 0
    shown = capsys.readouterr().out
    (head,) = (line for line in shown.splitlines() if line.startswith("strategy "))
    for column in ("depth", "pools", "step s", "speed-up", "95 %", "lag", "of bound"):
        assert column in head and f"{column}: " in shown
