# SPDX-License-Identifier: Apache-2.0
"""An observer that fails is reported once, switched off, and ends no run, unless the run is strict."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.core.events import LogRecord
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import ConservationError, StalenessViolation
from recipe.async_pipeline.observe.account.accounting import AccountingError
from recipe.async_pipeline.observe.observers import ACCOUNT, LOST, RETRY_S, Observers
from tests import HANG_S
from tests.fakes.trainer import SimTrainer


class Broken:
    """A subscriber of the event log that fails at the third record."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.calls = error, 0

    def __call__(self, record: LogRecord) -> None:
        self.calls += 1
        if self.calls >= 3:
            raise self.error


def run_with(broken: Broken, *, strict: bool = False) -> tuple[AsyncTrainingFlow, Observers, list[str]]:
    said: list[str] = []
    observers = Observers(said.append, strict=strict)
    flow = AsyncTrainingFlow(SimTrainer(), guard=observers.subscriber)
    flow.log.subscribe(broken, name=ACCOUNT)
    run_virtual(flow.run())
    return flow, observers, said


def test_a_run_completes_without_an_observer_that_failed() -> None:
    broken = Broken(AccountingError("pool train: 3 of 4 device-seconds"))
    flow, observers, said = run_with(broken)
    assert flow.result().steps == 6
    assert broken.calls == 3
    assert said == [
        f"{ACCOUNT} is switched off after an error: AccountingError: pool train: 3 of 4 device-seconds; "
        f"the run continues, {LOST[ACCOUNT]}"
    ]
    assert observers.off == {ACCOUNT: "AccountingError: pool train: 3 of 4 device-seconds"}
    assert not observers.is_on(ACCOUNT)


def test_a_strict_run_ends_with_the_error_of_its_observer() -> None:
    with pytest.raises(AccountingError, match="device-seconds"):
        run_with(Broken(AccountingError("device-seconds")), strict=True)


@pytest.mark.parametrize("error", [ConservationError("lost"), StalenessViolation("old"), KeyboardInterrupt()])
def test_checks_and_interrupts_always_end_the_run(error: BaseException) -> None:
    with pytest.raises(type(error)):
        run_with(Broken(error))


def test_a_value_is_missing_from_the_failure_on() -> None:
    said: list[str] = []
    observers, calls = Observers(said.append), list[str]()

    def measure(text: str) -> str:
        calls.append(text)
        if text == "bad":
            raise ValueError("no\n  such text")
        return text.upper()

    found = [observers.value("meter", measure, text, lost="without it") for text in ("a", "bad", "c")]
    assert (found, calls) == (["A", None, None], ["a", "bad"])
    assert said == [
        "meter is switched off after an error: ValueError: no such text; the run continues, without it"
    ]


def test_threads_that_fail_together_are_reported_once() -> None:
    said: list[str] = []
    observers = Observers(said.append)
    together = threading.Barrier(4)

    def fail() -> Any:
        together.wait(HANG_S)
        raise ValueError("x")

    call = observers.guard("meter", fail, lost="without it")
    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert len(said) == 1


def test_observers_fail_independently() -> None:
    observers = Observers(lambda text: None)

    def fail() -> None:
        raise ValueError("x")

    observers.guard("a", fail, lost="")()
    assert list(observers.off) == ["a"]
    assert observers.value("b", lambda: 7, lost="") == 7


def test_what_may_miss_a_call_is_called_again_after_a_pause() -> None:
    now, said, fails = [0.0], list[str](), [True]
    observers = Observers(said.append, now=lambda: now[0])

    def write(number: int) -> int:
        if fails[0]:
            raise OSError(28, "No space left on device")
        return number

    def value() -> int | None:
        return observers.value("the files", write, 7, lost="without them", attempts=3)

    assert value() is None and value() is None
    assert said == [
        "the files failed: OSError: [Errno 28] No space left on device; it is tried again, and switched off "
        "after 3 failures in a row"
    ]
    assert dict(observers.failing) == {"the files": "OSError: [Errno 28] No space left on device"}
    fails[0], now[0] = False, RETRY_S
    assert value() == 7 and not observers.failing
    fails[0] = True
    for pause in (0, 5, 10):
        now[0] += pause
        assert observers.is_on("the files")
        assert value() is None
    assert list(observers.off) == ["the files"] and not observers.failing
