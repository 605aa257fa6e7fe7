# SPDX-License-Identifier: Apache-2.0
"""What a real engine serves after a load is what was published, or the load is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.lab.job import with_cpu_settings
from tests.e2e.job import LIMIT_S, ROOT, check_clean_end, run_job, smoke_command

pytestmark = [pytest.mark.e2e, pytest.mark.probe]
ENGINES = ("vllm", "sglang")
WAYS = ("keep/host", "abort/host", "drain/host", "keep/device")
MANY = 200
"""Publications that the probe takes for the long form."""
AGREES = 1e-5
"""How much the log-probs of two engines may differ."""
TIE = 1e-4
"""A token is one of the likeliest if its logit is this close to the largest: engines round differently."""


def probe(task: Path, mode: str) -> dict[str, Any]:
    return run("engine_probe.py", task, mode, VLLM_ENABLE_V1_MULTIPROCESSING="0")


def run(script: str, task: Path, *arguments: str, **extra: str) -> dict[str, Any]:
    command = with_cpu_settings(
        [sys.executable, str(ROOT / "tests" / "e2e" / script), str(task / "model"), *arguments]
    )
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": str(ROOT), **extra}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("REPORT "))
    loaded: dict[str, Any] = json.loads(line.removeprefix("REPORT "))
    return loaded


def runner_of(name: str) -> tuple[str, dict[str, str]]:
    """Return the engine of the probes that a name means, and the setting of vLLM's model runner."""
    engine, _, runner = name.partition("-v")
    return engine, {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "2"))} if runner else {}


def test_tied_embeddings_are_served_as_published_and_a_skipped_one_is_caught(tied_task: Path) -> None:
    report = probe(tied_task, "load")
    assert report["first"]["ok"]["tensors_proved"] > 0, report
    assert report["engine"] == report["transformers"]
    assert report["engine"] != report["before"], "the published weights differ from those on disk"
    assert report["repeated"]["ok"]["tensors_proved"] > 0, "the copies of the first load, made again"
    assert report["engine_repeated"] == report["transformers_repeated"] != report["engine"]
    assert report["skipped"]["error"] == "ProofError"
    assert "embed_tokens.weight" in report["skipped"]["message"]


def test_weights_that_the_engine_repacked_are_never_announced(tied_task: Path) -> None:
    with pytest.raises(AssertionError, match="weight_loader|repacked|size"):
        report = probe(tied_task, "repacked")
        assert report["first"].get("error") is None, f"refused: {report['first']['message']}"


def test_lora_adapters_are_served_as_published_and_a_wrong_one_is_caught(tied_task: Path) -> None:
    report = probe(tied_task, "adapter")
    for loaded in report["loads"]:
        # Two tensors for each of seven modules of a layer.
        assert loaded["ok"]["tensors_proved"] % 14 == 0 < loaded["ok"]["tensors_proved"], loaded
    assert report["engine"] == report["transformers"]
    assert report["before"] not in report["engine"]
    assert len({tuple(said) for said in report["engine"]}) == 3
    assert report["disorder"]["error"] == "ProofError"
    assert "is served with values other than the published ones" in report["disorder"]["message"]


@pytest.mark.nightly
def test_lora_adapters_are_served_by_sglang_as_published(tied_task: Path) -> None:
    report = run("adapter_probe.py", tied_task, VERL_PLATFORM="cpu")
    for in_flight in ("keep", "abort", "drain"):
        for swap in report[in_flight]:
            assert max(swap["parts"].values()) <= TIE, (in_flight, swap)
    assert any(swap["versions"] == 2 for swap in report["keep"]), "no load has met the answer"
    assert any("after" in swap["parts"] for swap in report["abort"]), "no answer continued with an adapter"
    assert report["below_likeliest_to_base"] > TIE, "the base would say the same"


@pytest.mark.nightly
def test_experts_are_served_as_published(tmp_path: Path) -> None:
    report = run("engine_probe.py", tmp_path / "moe", "experts", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert [loaded["ok"]["tensors_proved"] for loaded in report["loads"]] == [report["published"]] * 3, report
    assert report["engine"] == report["transformers"]
    assert len({tuple(said) for said in report["engine"]}) == 3


@pytest.fixture(
    scope="module",
    params=[
        # Both model runners of vLLM are tested by default, and a step in flight during a load. On a CPU, an
        # interpreter runs the kernels of the second runner.
        *((engine, 10) for engine in ENGINES),
        ("vllm-async-v2", 4),
        # More publications of the second runner would take longer than a test may.
        pytest.param(("vllm-async-v1", 25), marks=pytest.mark.nightly),
        pytest.param(("vllm-async-v2", 15), marks=pytest.mark.nightly),
        *(pytest.param((engine, MANY), marks=pytest.mark.nightly) for engine in ENGINES),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def versions(untied_model: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """So many publications for each way to load, at random moments."""
    name, publications = request.param
    engine, runner = runner_of(name)
    arguments = (engine, str(publications))
    found = run("versions_probe.py", untied_model, *arguments, VERL_PLATFORM="cpu", **runner)
    return {**found, "publications": publications}


@pytest.mark.parametrize("way", WAYS)
def test_every_token_is_recorded_with_the_version_that_wrote_it(versions: dict[str, Any], way: str) -> None:
    found = versions[way]
    assert found["wrong"] == []
    if way.startswith("drain"):
        assert found["boundaries"] == 0
        # A load waits for the answers that are being written, at any speed of the machine.
        assert found["answers"] >= versions["publications"], "too few loads have met requests"
    else:
        assert found["boundaries"] >= versions["publications"] / 5, "too few loads have met requests"


def test_after_many_loads_the_engine_says_what_a_fresh_model_says(versions: dict[str, Any]) -> None:
    assert versions["engine"] == versions["transformers"]
    of_a_way = versions["publications"]
    if versions["publications"] >= MANY:
        of_a_way += 2 + len(versions[WAYS[0]]["swaps"])
    assert versions["versions"] == len(WAYS) * of_a_way + 1, "no load was left out"


@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.nightly)])
def test_a_version_uses_prefixes_of_others_only_if_it_may(tied_task: Path, engine: str) -> None:
    report = run("prefix_probe.py", tied_task, engine, VERL_PLATFORM="cpu")
    assert report.pop("order") == [5, 6, 7], "what is due first goes first"
    assert set(report) == {"False", "session", "True"}
    for reuse, case in report.items():
        reused = {name for name, tokens in case.items() if tokens}
        of_others = {"next version", "waited during the load"} if reuse == "True" else set()
        its_own = {name for name in case if "its session" in name} if reuse != "False" else set()
        assert reused == {"same version", *of_others, *its_own}, report
        if its_own:
            # What its second turn has read was computed by a later version.
            assert case["its session, next but one"] > case["its session, next version"], report


@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.nightly)])
def test_answers_have_the_form_that_a_request_asks_for(untied_model: Path, engine: str) -> None:
    report = run("forms_probe.py", untied_model, engine, VERL_PLATFORM="cpu")
    answer = r'\{"move":"[LR]","sure":(true|false)\}'
    call = rf'<tool_call>\{{"name":"(look|step)","arguments":{answer}\}}</tool_call>'
    for name, form in {
        "schema": answer,
        "any tool": rf"({call})+",
        "named tool": call.replace("look|step", "look"),
        "schema or tools": rf"{answer}|({call})+",
    }.items():
        found = report[name]
        # JSON permits white space, of which the toy model writes much.
        whole = ["".join(text.split()) for text in found["whole"]]
        assert whole and all(re.fullmatch(form, text) for text in whole), found
        # The log-probs are the ones among the permitted tokens.
        assert -AGREES < found["least"] and found["mean"] > 1.0, found

    for policy, versions in {"keep": {1, 2}, "abort": {1}, "drain": {1}}.items():
        found = report[policy]
        assert re.fullmatch(r"\[([01],){10,49}[01]?\]?", re.sub(r"\s", "", found["text"])), found
        assert len(found["spans"]) in versions, found
    assert len(report["keep"]["spans"]) == 2 and report["abort"]["spans"][0][0] == report["abort"]["last"]


@pytest.mark.nightly
@pytest.mark.parametrize("versions", [(engine, MANY) for engine in ENGINES], indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_after_a_load_the_engine_says_what_transformers_says(versions: dict[str, Any], way: str) -> None:
    """Also in the middle of an answer, except where it continues over old keys and values."""
    swaps = versions[way]["swaps"]
    for swap in swaps:
        assert max(swap["parts"].values()) <= TIE, swap
    in_the_middle = [swap for swap in swaps if swap["versions"] == 2]
    if way.startswith("drain"):
        assert in_the_middle == []
    else:
        assert in_the_middle, "no load has met the answer"
    if way.startswith("abort"):
        assert all("after" in swap["parts"] for swap in in_the_middle)


def margins_where_different(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[float]:
    """Return the margin of the likeliest token where two greedy responses first differ, of each such pair."""
    return [
        next(margin for said, theirs, margin in zip(*places, strict=False) if said != theirs)
        for places in zip(one["greedy"], other["greedy"], one["margins"], strict=True)
        if places[0] != places[1]
    ]


def test_greedy_responses_differ_where_the_margin_is_reported() -> None:
    one = {"greedy": [[1, 2, 3], [4, 5]], "margins": [[0.5, 0.25, 0.125], [2.0, 1.0]]}
    assert margins_where_different(one, {"greedy": [[1, 2, 3], [4, 5]]}) == []
    assert margins_where_different(one, {"greedy": [[1, 2, 7], [6]]}) == [0.125, 2.0]


@pytest.mark.nightly
def test_both_engines_mean_the_same_by_a_version(untied_task: Path, tmp_path: Path) -> None:
    """Over five on-policy steps, each scores what the other has written under the same version; the likeliest
    tokens are the same.
    """
    checkpoints = tmp_path / "checkpoints"
    command = smoke_command(
        "async_strategy=on_policy",
        "trainer.total_training_steps=5",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={checkpoints}",
        f"trainer.v1.async_pipeline.run_dir={tmp_path / 'run'}",
    )
    check_clean_end(run_job(command, tmp_path / "run", untied_task), "on_policy", 0, 5)

    reports: dict[str, Any] = {}
    theirs = "-"
    for number, engine in enumerate(["vllm", "sglang", "vllm"]):
        arguments = (engine, theirs, str(checkpoints))
        report = run("agreement_probe.py", untied_task, *arguments, VERL_PLATFORM="cpu")
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(report), encoding="utf-8")
        reports[engine], theirs = report, str(path)
    for engine, report in reports.items():
        assert len(report["differences"]) == 5 * 32
        largest = {name: max(of) for name, of in report["errors"].items()}
        assert max(report["differences"]) <= AGREES, (engine, largest)
    for one, other in zip(reports["vllm"]["written"], reports["sglang"]["written"], strict=True):
        # The engines may differ only where two tokens are equally likely to them.
        ties = margins_where_different(one, other)
        assert all(margin <= 2 * AGREES for margin in ties), ties
