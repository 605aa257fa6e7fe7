# SPDX-License-Identifier: Apache-2.0
"""A step passes, fails or is not run, and no process of it is left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from recipe.async_pipeline.lab.gpu_kit.steps import (
    FAILED,
    NOT_RUN,
    PASSED,
    CheckStep,
    Figure,
    Options,
    logs_of,
    run_step,
    run_steps,
)
from recipe.async_pipeline.verl_bridge.rollout.vllm.facts import engine_line
from tests import HANG_S


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(
        device="cpu", devices=1, model=None, configs=tmp_path, task=lambda: tmp_path, folder=tmp_path
    )


def step(code: str, *, name: str = "one", limit_s: float = HANG_S, missing: str | None = None) -> CheckStep:
    """A step that runs Python code, with the file for its figures as `sys.argv[1]`."""

    def command(options: Options, written: Path) -> Sequence[str]:
        return (sys.executable, "-c", code, str(written))

    return CheckStep(
        name=name,
        shows="that it works",
        limit_s=limit_s,
        command=command,
        missing=lambda options: missing,
        figures=lambda found: [Figure("twice", 2 * found["n"])],
    )


WRITES = "import sys; open(sys.argv[1], 'w').write('{\"n\": 3}')"


def test_a_step_that_writes_its_figures_passes(options: Options) -> None:
    result = run_step(step(WRITES), options)
    assert (result.status, result.figures, result.detail) == (PASSED, [Figure("twice", 6)], "")
    assert result.seconds > 0 and result.written == {"n": 3}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (WRITES + "; print('no driver'); sys.exit(3)", ("no driver", "exit status 3")),
        ("print('all is well')", ("all is well", "exit status 0")),
        ("import sys; open(sys.argv[1], 'w'); print('cut')", ("cut", "exit status 0")),
    ],
)
def test_a_step_that_fails_shows_the_end_of_its_output(
    options: Options, code: str, words: tuple[str, ...]
) -> None:
    result = run_step(step(code), options)
    assert result.status == FAILED and result.figures == ([Figure("twice", 6)] if WRITES in code else None)
    assert all(word in result.detail for word in words)
    assert str(options.folder / "one.log") in result.detail


def test_a_run_says_which_path_its_engine_took(options: Options) -> None:
    facts = {"model runner": "V2 (a.Class)", "attention": "FLASH_ATTN", "executor": "mp"}
    line = engine_line("0.24.0", facts)
    code = f"print('  12.3 s  {line}'); print('  14.0 s  {line}'); {WRITES}"
    result = run_step(step(code), options)
    assert result.figures == [Figure("twice", 6), Figure("engine", line.removeprefix("engine: "))]


def test_the_runs_of_a_benchmark_say_it_too(options: Options) -> None:
    folder = logs_of("one", options) / "dual_buffer"
    folder.mkdir(parents=True)
    line = engine_line("0.24.0", {"model runner": "V1 (a.Class)"})
    (folder / "job.log").write_text(f"(Server pid=7) [async_pipeline] {line}\n", encoding="utf-8")
    assert run_step(step(WRITES), options).figures == [
        Figure("twice", 6),
        Figure("engine", "vLLM 0.24.0, model runner V1 (a.Class)"),
    ]


def test_figures_of_an_earlier_run_do_not_count(options: Options) -> None:
    run_step(step(WRITES), options)
    assert run_step(step("pass"), options).status == FAILED


@pytest.mark.slow
def test_a_step_without_end_is_ended_with_its_processes(options: Options) -> None:
    code = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '1000']); "
        "print(child.pid, flush=True); child.wait()"
    )
    result = run_step(step(code, limit_s=3.0), options)
    assert result.status == FAILED and "it did not end within 3 s" in result.detail
    child = int((options.folder / "one.log").read_text(encoding="utf-8").split()[0])
    left = Path(f"/proc/{child}/stat")
    # The process that adopted it may not have reaped it yet.
    assert not left.exists() or left.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"


def test_a_step_ends_no_process_that_was_there_before(options: Options) -> None:
    with subprocess.Popen(["sleep", "1000"]) as other:
        run_step(step(WRITES), options)
        ended = other.poll()
        other.kill()
    assert ended is None


def test_each_step_is_reported_and_one_failure_ends_no_other(options: Options) -> None:
    said: list[str] = []
    bad = "print('begin'); print('loading'); print('x' * 999); print('OSError: no memory'); exit(1)"
    steps = [
        step(bad, name="bad"),
        step(WRITES, name="absent", missing="no such device"),
        step(WRITES, name="good"),
    ]
    results = run_steps(steps, options, report=said.append, chosen={"bad", "absent", "good"})
    assert [(one.name, one.status) for one in results] == [
        ("bad", FAILED),
        ("absent", NOT_RUN),
        ("good", PASSED),
    ]
    assert results[1].detail == "no such device"
    ended = "exit status 1: OSError: no memory; the whole output is in"
    assert said[1].endswith(f"{ended} {options.folder / 'bad.log'}")
    assert [line.strip()[:9] for line in said[2:5]] == ["loading", "x" * 9, "OSError: "]
    assert all(line.startswith("    ") and len(line) < 250 for line in said[2:5])
    assert said[5] == "absent: not run: no such device"
    assert [line.partition(":")[0] for line in said[6:]] == ["good", "good"]


def test_the_engines_of_a_step_are_reported_at_once(options: Options) -> None:
    line = engine_line("0.24.0", {"model runner": "V2 (a.Class)", "attention": "FLASH_ATTN"})
    said: list[str] = []
    run_steps([step(f"print('{line}'); {WRITES}")], options, report=said.append, chosen=("one",))
    assert said[-2].startswith("one: passed after") and said[-1] == f"    {line}"


def test_a_step_that_was_not_selected_is_in_the_report(options: Options) -> None:
    said: list[str] = []
    steps = [step(WRITES, name="one"), step("raise SystemExit(1)", name="two")]
    results = run_steps(steps, options, report=said.append, chosen=("one",))
    assert [(one.name, one.status, one.detail) for one in results] == [
        ("one", PASSED, ""),
        ("two", NOT_RUN, "not selected"),
    ]
    assert not any(line.startswith("two") for line in said)
