# SPDX-License-Identifier: Apache-2.0
"""The caller of any reward function gets a score or an error before the deadline."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pebble import ProcessPool

from recipe.async_pipeline import redaction
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.core.waits.deadline import ABANDONED
from recipe.async_pipeline.errors import ConfigError, RewardError
from recipe.async_pipeline.verl_bridge.reward import executor
from recipe.async_pipeline.verl_bridge.reward.executor import (
    BATCH_WAIT_S,
    FunctionLocation,
    Limits,
    RewardGuard,
    checked,
    only_errors,
)
from tests import FAKES, HANG_S
from tests.fakes.waiting import until

FILE = str(FAKES / "reward_functions.py")
Make = Callable[..., RewardGuard]


@pytest.fixture
def guard() -> Iterator[Make]:
    made: list[RewardGuard] = []

    def make(
        name: str, path: str = FILE, *, kwargs: dict[str, Any] | None = None, **limits: Any
    ) -> RewardGuard:
        made.append(
            RewardGuard(
                FunctionLocation(path, name, kwargs or {}),
                Limits(**{"timeout_s": HANG_S, "attempts": 1, "concurrency": 1, **limits}),
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def response(text: str) -> dict[str, Any]:
    return {"data_source": "toy", "solution_str": text, "ground_truth": "46", "extra_info": {}}


def score(guard: RewardGuard, *texts: str, run: Callable[..., Any] = asyncio.run) -> list[Any]:
    """Score all responses concurrently. Returns a score or an error for each.

    `run`: `run_virtual` for an async function, which runs in the event loop.
    """

    async def score_all() -> list[Any]:
        calls: list[Coroutine[Any, Any, Any]] = [guard.score(**response(text)) for text in texts]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    found: list[Any] = run(score_all())
    return found


def test_scores_come_back_from_another_process(guard: Make) -> None:
    one = guard("one", kwargs={"bonus": 0.25})
    assert score(one, "46", "47", "dict") == [1.25, 0.25, {"score": 0.5, "acc": 1}]
    assert score(one, "pid")[0] != os.getpid()


def test_a_result_needs_no_module_of_the_file(guard: Make, tmp_path: Path) -> None:
    file = tmp_path / "rewards_of_a_user.py"
    file.write_text(
        "import enum\n\nclass Colour(enum.Enum):\n    RED = 1\n\n"
        "def one(**answer):\n    return {'score': 1.0, 'colour': Colour.RED}\n"
    )
    assert score(guard("one", str(file)), "46") == [{"score": 1.0, "colour": "Colour.RED"}]


@pytest.mark.slow
def test_a_pool_that_is_broken_is_replaced(guard: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[ProcessPool] = []
    schedule = ProcessPool.schedule

    def breaks_once(pool: ProcessPool, *args: Any, **how: Any) -> Any:
        if not broken:
            broken.append(pool)
            raise RuntimeError("Unexpected error within the Pool")
        assert pool is not broken[0]
        return schedule(pool, *args, **how)

    monkeypatch.setattr(ProcessPool, "schedule", breaks_once)
    assert score(guard("one"), "46", "47") == [1.0, 0.0]
    assert broken


def test_a_function_starts_processes_that_call_its_file(guard: Make) -> None:
    words = ["executor", "spawn", "process"]
    assert score(guard("in_processes"), *words) == [len(word) + 0.5 for word in words]


@pytest.mark.parametrize("name", ["my rewards.py", "json.py", "v1.2.py", "__main__.py"])
def test_a_file_of_any_name_is_loaded_and_hides_no_module(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Rubric:\n    bonus: float = 1.0\n"
        "def score(**_):\n    return Rubric().bonus\n"
    )
    before = {name: sys.modules.get(name) for name in ("json", "__main__")}
    function = FunctionLocation(str(file), "score", {}).load()
    assert function() == 1.0
    assert pickle.loads(pickle.dumps(function)) is function
    assert {name: sys.modules.get(name) for name in before} == before


def test_a_file_that_fails_leaves_no_module_behind(tmp_path: Path) -> None:
    file = tmp_path / "failing_rewards.py"
    file.write_text("raise RuntimeError('no key')\n")
    with pytest.raises(ConfigError, match="no key"):
        FunctionLocation(str(file), "score", {}).load()
    file.write_text("def score(**_):\n    return 1.0\n")
    assert FunctionLocation(str(file), "score", {}).load()() == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", "raised: one: ValueError: no such rule"),
        ("die", "died: one: ProcessExpired"),
        ("none", "invalid: the score must be a finite number, got None"),
        ("nan", "invalid: the score must be a finite number, got nan"),
        ("text", "invalid: the score must be a finite number, got '1'"),
    ],
)
def test_a_missing_score_is_an_error_with_its_reason(guard: Make, text: str, reason: str) -> None:
    one = guard("one")
    (error,) = score(one, text)
    assert isinstance(error, RewardError)
    assert str(error).startswith(reason)
    assert score(one, "46") == [1.0], "the next call is not affected"


ERRORS = {
    "exit": "SystemExit: 3",
    "interrupt": "KeyboardInterrupt: now",
    "cancel": "CancelledError: mine",
    "stop": "StopIteration: no more",
    "close": "GeneratorExit: done",
    "two": "TwoArguments: first",
}


@pytest.mark.slow
@pytest.mark.parametrize("word", [*ERRORS, "code"])
def test_exceptions_that_break_a_pool_or_an_event_loop_become_errors(guard: Make, word: str) -> None:
    strange = guard("strange", attempts=2)
    (error,) = score(strange, word)
    assert isinstance(error, RewardError)
    raised = f"raised: strange: {ERRORS[word]}" if word in ERRORS else "invalid: the score must be a finite"
    assert str(error).startswith(raised)
    assert score(strange, "46") == [1.0]


@pytest.mark.parametrize("word", ["exit", "interrupt", "two"])
def test_exceptions_of_an_async_function_become_errors(guard: Make, word: str) -> None:
    service = guard("unusual", timeout_s=0.2)
    first, second, third = score(service, word, "0", "60", run=run_virtual)
    assert str(first) == f"raised: unusual: {ERRORS[word]}"
    assert second == 1.0
    assert str(third) == "timeout: unusual took more than 0.2 s", (
        "the cancellation at the deadline is not an exception of the function"
    )


async def test_a_cancelled_caller_gets_its_cancellation(guard: Make) -> None:
    with pytest.raises(asyncio.CancelledError):
        call = asyncio.ensure_future(guard("unusual").score(solution_str="60"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        call.cancel()
        await call


@pytest.mark.parametrize("word", ERRORS)
def test_only_errors_reach_the_caller_of_a_thread(word: str) -> None:
    raises = only_errors(FunctionLocation(FILE, "strange", {}).load())

    async def call() -> Any:
        return await asyncio.to_thread(raises, **response(word))

    ordinary = word == "two"
    with pytest.raises(Exception, match=ERRORS[word].partition(" ")[2]) as caught:
        asyncio.run(asyncio.wait_for(call(), HANG_S))
    assert isinstance(caught.value, RewardError) is not ordinary, "ordinary exceptions are not wrapped"


def test_an_error_names_the_function_that_verl_wraps() -> None:
    def judge(**_: Any) -> float:
        raise KeyboardInterrupt("enough")

    def with_keywords(function: Callable[..., Any], kwargs: dict[str, Any], /, **more: Any) -> Any:
        return function(**kwargs, **more)

    with pytest.raises(RewardError, match="^raised: judge: KeyboardInterrupt: enough$"):
        only_errors(partial(with_keywords, judge, {}))(solution_str="")


@pytest.mark.slow
def test_child_processes_of_a_function_end_with_it(guard: Make, tmp_path: Path) -> None:
    strange = guard("strange", timeout_s=1.5)
    (error,) = score(strange, f"start {tmp_path / 'pid'}")
    assert str(error) == "timeout: strange took more than 1.5 s"
    psutil.Process(int((tmp_path / "pid").read_text())).wait(timeout=HANG_S)


def test_the_memory_of_a_function_is_limited(guard: Make) -> None:
    one = guard("one", memory_mb=1024)
    (error,) = score(one, "eat")
    assert str(error).startswith("raised: one: MemoryError")
    assert score(one, "46") == [1.0]


def test_a_process_leaves_no_core_dump(guard: Make) -> None:
    assert score(guard("one"), "limits") == [0.0]


@pytest.mark.slow
def test_an_endless_loop_is_killed_at_the_deadline(guard: Make) -> None:
    one = guard("one", timeout_s=1.5)
    (error,) = score(one, "hog")
    assert str(error) == "timeout: one took more than 1.5 s"
    assert score(one, "46") == [1.0]


@pytest.mark.slow
def test_a_failed_call_is_retried(guard: Make, tmp_path: Path) -> None:
    assert score(guard("one", timeout_s=3.0, attempts=2), f"once {tmp_path / 'seen'}") == [0.0]
    assert (tmp_path / "seen").exists()


def test_an_async_function_is_cancelled_at_the_deadline(guard: Make) -> None:
    service = guard("service", timeout_s=0.2, concurrency=8)
    found = score(service, "0", "60", "0.01", run=run_virtual)
    assert (found[0], found[2]) == (1.0, 1.0)
    assert str(found[1]) == "timeout: service took more than 0.2 s"


def test_the_deadline_holds_for_an_async_function_that_swallows_its_cancellation(
    guard: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "GRACE_S", 0.1)
    found = score(guard("stubborn", timeout_s=0.1, concurrency=1), "30", "0", run=run_virtual)
    assert str(found[0]) == f"timeout: stubborn took more than 0.1 s; {ABANDONED}"
    assert found[1] == 1.0, "it gave its place to the next one"


def test_an_async_function_behind_a_plain_decorator_is_awaited(guard: Make) -> None:
    assert score(guard("decorated"), "one", "two words") == [0.5, 0.0]
    called = only_errors(FunctionLocation(FILE, "decorated", {}).load())
    assert asyncio.run(asyncio.to_thread(called, solution_str="one")) == 0.5


def test_a_timeout_of_the_function_itself_is_its_error(guard: Make) -> None:
    (error,) = score(guard("impatient"), "")
    assert str(error) == "raised: impatient: TimeoutError: the service is slow"


def test_secrets_are_removed_from_errors(guard: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async def leaks(**_: Any) -> float:
        raise ValueError("HF replied hf_secret_0123")

    monkeypatch.setenv("HF_TOKEN", "hf_secret_0123")
    monkeypatch.setattr(
        redaction, "_hider_of_this_process", lambda: redaction.hider_of(os.environ, for_programs=True)
    )
    monkeypatch.setattr(FunctionLocation, "load", lambda self: leaks)
    (error,) = score(guard("any"), "46")
    assert str(error) == "raised: any: ValueError: HF replied ***"


def test_concurrent_calls_are_bounded(guard: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now, most = 0, 0

    async def counted(**_: Any) -> float:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0)
        now -= 1
        return 1.0

    monkeypatch.setattr(FunctionLocation, "load", lambda self: counted)
    assert score(guard("any", concurrency=3), *"abcdefgh") == [1.0] * 8
    assert most == 3


def test_a_function_of_lists_gets_micro_batches(guard: Make) -> None:
    assert score(guard("many", batch=3), *["46"] * 7) == [3.0] * 6 + [1.0]


def test_one_bad_response_does_not_fail_the_others_of_its_batch(guard: Make) -> None:
    found = score(guard("many", batch=3, attempts=2), "46", "raise", "47")
    assert (found[0], found[2]) == (1.0, 0.0)
    assert str(found[1]).startswith("raised: many: ValueError: poisoned")


def test_the_number_of_scores_must_match_the_responses(guard: Make) -> None:
    found = score(guard("many", batch=2), "46", "short")
    assert {str(error) for error in found} == {"invalid: 2 responses require a list of 2 scores, got [1.0]"}


@pytest.mark.slow
def test_imports_of_a_file_do_not_count_against_the_deadline(guard: Make, tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time, os\nif os.environ.get('SLOW'): time.sleep(2)\ndef one(**_): return 1.0\n")
    with pytest.MonkeyPatch.context() as patch:
        one = guard("one", str(slow), timeout_s=1.0)
        patch.setenv("SLOW", "1")
        assert score(one, "46") == [1.0]


@pytest.mark.virtual_time
async def test_the_timer_of_a_sent_batch_does_not_cut_the_next(
    guard: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def counted(solution_strs: list[str], **_: Any) -> list[float]:
        return [float(len(solution_strs))] * len(solution_strs)

    monkeypatch.setattr(FunctionLocation, "load", lambda self: counted)
    many = guard("any", batch=4)

    async def later(waits: float) -> Any:
        await asyncio.sleep(waits * BATCH_WAIT_S)
        return await many.score(**response("46"))

    # The first batch is full immediately; its timer would fire while the next four responses arrive.
    waits = (0, 0, 0, 0, 0.5, 0.9, 1.1, 1.4)
    assert await asyncio.gather(*(later(one) for one in waits)) == [4.0] * 8


@pytest.mark.slow
def test_a_process_of_the_pool_ends_with_its_parent(tmp_path: Path) -> None:
    hog = (
        "import asyncio; from recipe.async_pipeline.verl_bridge.reward.executor import *\n"
        f"function = FunctionLocation({FILE!r}, 'told', {{}})\n"
        "guard = RewardGuard(function, Limits(timeout_s=600.0, concurrency=1))\n"
        f"if __name__ == '__main__': asyncio.run(guard.score(solution_str={str(tmp_path / 'pid')!r}))\n"
    )
    script = tmp_path / "hog.py"
    script.write_text(hog)

    with subprocess.Popen(
        [sys.executable, str(script)],
        cwd=Path(FILE).parents[1],
        env={**os.environ, "PYTHONPATH": str(Path(FILE).parents[1])},
    ) as parent:
        pid = tmp_path / "pid"
        until(lambda: pid.exists() and bool(pid.read_text()), "the function runs")
        child = psutil.Process(int((tmp_path / "pid").read_text()))
        parent.kill()
    child.wait(timeout=HANG_S)


@pytest.mark.parametrize(
    ("path", "name"),
    [(FILE, "nothing"), ("nowhere.py", "one"), ("pkg://no.such.package", "one"), ("file://x.txt", "one")],
)
def test_a_missing_function_is_an_error(path: str, name: str) -> None:
    with pytest.raises(ConfigError, match="correct path and name"):
        RewardGuard(FunctionLocation(path, name, {}), Limits(timeout_s=1.0))


def test_a_function_of_a_package_is_loaded() -> None:
    assert (
        FunctionLocation("pkg://recipe.async_pipeline.lab.tasks.reward", "compute_score", {}).load()(
            "toy", "46", "46"
        )
        == 1.0
    )


@pytest.mark.parametrize("good", [0, 1.5, True, {"score": 2}, np.float16(1), {"score": np.bool_(True)}])
def test_checked_returns_a_finite_score(good: Any) -> None:
    found = checked(good)
    assert found == good
    assert type(found["score"] if isinstance(found, dict) else found) is float
