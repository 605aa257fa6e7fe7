# SPDX-License-Identifier: Apache-2.0
"""A tracker that fails gets its calls later, one that hangs holds up nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.core.waits.retry import Retry
from recipe.async_pipeline.observe.observers import Observers
from recipe.async_pipeline.observe.trackers import ServiceCalls, Trackers
from tests import HANG_S


class Service:
    """A service that fails `failures` times, and hangs while `answers` is not set."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.got = failures, list[int]()
        self.answers, self.called = threading.Event(), threading.Event()
        self.answers.set()
        self.complete = threading.Semaphore(0)

    def call(self, number: int) -> Callable[[], None]:
        def take() -> None:
            self.called.set()
            assert self.answers.wait(HANG_S)
            if self.failures:
                self.failures -= 1
                raise ConnectionError("503")
            self.got.append(number)
            self.complete.release()

        return take

    def wait_for(self, calls: int) -> None:
        for _ in range(calls):
            assert self.complete.acquire(timeout=HANG_S)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def observers(said: list[str]) -> Observers:
    return Observers(said.append)


def delivery(observers: Observers, **settings: Any) -> ServiceCalls:
    retry = Retry(limit=4, first=0, longest=0)
    return ServiceCalls("the tracker x", observers, lost="without it", **{"retry": retry, **settings})


def test_a_call_is_done_when_it_returns(observers: Observers, said: list[str]) -> None:
    service, deliver = Service(), delivery(observers)
    for number in range(100):
        deliver(service.call(number))
        assert service.got[-1] == number
    deliver.close()
    assert said == []


def test_a_failed_call_is_repeated_in_order(observers: Observers, said: list[str]) -> None:
    service, deliver = Service(failures=3), delivery(observers)
    for number in range(5):
        deliver(service.call(number))
    service.wait_for(5)
    deliver.close()
    assert service.got == list(range(5))
    assert observers.off == {}
    assert said == [
        "the tracker x fails: ConnectionError: 503; it is tried again, and switched off after 4 failures in "
        "a row",
        "the tracker x works again",
    ]


def test_a_service_that_keeps_failing_is_switched_off(observers: Observers, said: list[str]) -> None:
    service, deliver = Service(failures=4), delivery(observers)
    deliver(service.call(1))
    deliver.close()
    deliver(service.call(2))
    assert (service.got, observers.off) == ([], {"the tracker x": "ConnectionError: 503"})
    assert said[-1].startswith("the tracker x is switched off after an error: ConnectionError: 503; the run")


def test_a_service_that_hangs_holds_up_one_call_for_a_while_and_no_other(observers: Observers) -> None:
    now = [0.0]
    service = Service()
    deliver = delivery(observers, patience_s=0.01, stuck_s=60.0, now=lambda: now[0])
    service.answers.clear()
    for number in range(5):
        deliver(service.call(number))
    assert service.called.wait(HANG_S)
    service.answers.set()
    service.wait_for(5)
    assert service.got == list(range(5)) and observers.off == {}

    service.answers.clear()
    service.called.clear()
    deliver(service.call(5))
    assert service.called.wait(HANG_S)
    now[0] = 61.0
    deliver(service.call(6))
    assert observers.off == {"the tracker x": "TimeoutError: no answer for 60 s"}
    service.answers.set()
    service.wait_for(1)
    assert service.got == list(range(6)), "what it was in is done, the rest is dropped"


def test_the_end_waits_for_a_service_for_a_bounded_time(observers: Observers) -> None:
    service, deliver = Service(), delivery(observers, patience_s=0.0)
    service.answers.clear()
    deliver(service.call(1))
    deliver.close(0.01)
    assert observers.off == {"the tracker x": "TimeoutError: 1 calls were left at the end"}
    service.answers.set()


def test_a_strict_run_gets_the_error() -> None:
    deliver = delivery(Observers(lambda line: None, strict=True))
    with pytest.raises(ConnectionError):
        deliver(Service(failures=1).call(1))


class Logger:
    """verl's loggers of metrics and of generations, for each tracker; `bad` always fails."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.refusals = 0
        """Times that `late` cannot be opened."""
        self.opens = threading.Event()
        """Set when `late` answers."""
        self.opens.set()

    def connect(self, name: str) -> Any:
        if name == "late":
            assert self.opens.wait(HANG_S)
        refuses = name == "late" and self.refusals > 0
        self.refusals -= refuses
        return SimpleNamespace(
            logger={} if refuses else {name: None},
            log=lambda *, data, step: self.take(name, data),
            finish=lambda: self.got.append((name, "finished")),
        )

    def take(self, name: str, data: Any) -> None:
        if name == "bad":
            raise ConnectionError("503")
        self.got.append((name, data))

    def log(self, loggers: list[str], samples: Any, step: int) -> None:
        self.take(loggers[0], samples)


@pytest.fixture
def logger() -> Logger:
    return Logger()


def test_a_tracker_that_fails_hides_metrics_and_samples_from_no_other(
    observers: Observers, logger: Logger
) -> None:
    trackers = Trackers(["good", "bad"], logger.connect, logger, observers)
    trackers.log_metrics({"a": 1}, 1)
    trackers.log(["good", "bad", "unknown"], ["text"], 1)
    trackers.close()
    assert logger.got == [("good", {"a": 1}), ("good", ["text"]), ("good", "finished")]
    assert observers.off == {"the tracker bad": "ConnectionError: 503"}


def test_a_tracker_that_cannot_be_opened_at_first_gets_its_calls_later(
    observers: Observers, logger: Logger, said: list[str]
) -> None:
    logger.refusals = 1
    trackers = Trackers(["late"], logger.connect, logger, observers)
    for step in (1, 2):
        trackers.log_metrics({"a": step}, step)
    assert logger.got == []
    trackers.close()
    assert logger.got == [("late", {"a": 1}), ("late", {"a": 2}), ("late", "finished")]
    assert said[0].startswith("the tracker late fails: ConnectionError: it could not be opened; it is tried")
    assert observers.off == {}


def test_a_tracker_that_hangs_when_it_is_opened_holds_up_no_other(
    observers: Observers, logger: Logger
) -> None:
    logger.opens.clear()
    trackers = Trackers(["late", "good"], logger.connect, logger, observers, patience_s=0.01)
    trackers.log_metrics({"a": 1}, 1)
    trackers.log_metrics({"a": 2}, 2, only=["late"])
    logger.opens.set()
    trackers.close()
    assert [data for name, data in logger.got if name == "late"] == [{"a": 1}, {"a": 2}, "finished"]
    assert [data for name, data in logger.got if name == "good"] == [{"a": 1}, "finished"]
