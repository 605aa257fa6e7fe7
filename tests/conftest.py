# SPDX-License-Identifier: Apache-2.0
"""Fixtures and hooks of all tests. Modules that import verl load late, so other tests stay fast."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import importlib.util
import inspect
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from recipe.async_pipeline.core.waits.clock import run_virtual
from tests import HANG_S

pytest_plugins = ["tests.nightly"]

# The same examples in every run, nothing left on disk, no clock: a busy machine must not fail a test.
settings.register_profile("schedules", max_examples=60, deadline=None, database=None, derandomize=True)
settings.load_profile("schedules")

# Of Ray: how long a start may wait for its first process, and for an answer of it. The jobs inherit it.
os.environ.setdefault("RAY_gcs_server_port_wait_time_s", f"{HANG_S:.0f}")

Load = Callable[[str], ModuleType]


@pytest.fixture(scope="session")
def load() -> Iterator[Load]:
    """Return a function that imports a module on the CPU platform and ignores the stack's warnings."""

    def load_module(name: str) -> ModuleType:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = importlib.import_module(name)
        gc.freeze()
        return found

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VERL_PLATFORM", "cpu")
        environment.setenv("VERL_ENGINE_DEVICE", "cuda")
        environment.setenv("HF_HUB_OFFLINE", "1")
        yield load_module


@pytest.fixture(scope="module")
def module(request: pytest.FixtureRequest, load: Load) -> ModuleType:
    """The module of the package that the file of the test mirrors, loaded by `load`."""
    mirror = request.path.relative_to(Path(__file__).parent)
    return load(".".join(("recipe.async_pipeline", *mirror.parent.parts, mirror.stem.removeprefix("test_"))))


STACK = ("torch", "ray", "verl", "vllm", "transformers", "tensordict", "tokenizers", "peft", "transfer_queue")
MISSING = {name for name in STACK if importlib.util.find_spec(name) is None}
"""Empty where setup.sh has run. Elsewhere, tests that import one of these are skipped instead of failed."""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    missing = re.search(r"No module named '(\w+)", str(report.longrepr)) if report.failed else None
    if missing and missing[1] in MISSING:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: no {missing[1]}")
    return report


OF_LANES = ("e2e", "probe", "real_engine")
"""Marks by whose spelling `tests.lanes` finds the files of a lane."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missed = {
        (str(item.path), mark)
        for item in items
        for mark in OF_LANES
        if item.get_closest_marker(mark) and f"mark.{mark}" not in _source(item.path)
    }
    if missed:
        raise pytest.UsageError(f"lanes find files by `pytest.mark.NAME`, missing in {sorted(missed)}")


def pytest_collection_finish() -> None:
    """Keep what is imported out of garbage collections, which took an eighth of the time of all tests."""
    gc.collect()
    gc.freeze()


@functools.cache
def _source(path: Path) -> str:
    return path.read_text("utf-8")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Draw the same random numbers in every run, also in the fixtures of the test."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        # Not `torch.manual_seed`: for each device that is not there, it formats the whole stack.
        sys.modules["torch"].default_generator.manual_seed(0)


STUCK_S = 1500.0
"""Seconds after which an async test in real time is stuck."""


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]], *, virtual_time: bool) -> Callable[..., None]:
    """Return a plain function that runs an async test in an event loop."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        if virtual_time:
            run_virtual(test(**arguments))
        else:
            asyncio.run(asyncio.wait_for(test(**arguments), STUCK_S))

    return run


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        own_clock = pyfuncitem.get_closest_marker("virtual_time") is not None
        pyfuncitem.obj = in_a_loop(pyfuncitem.obj, virtual_time=own_clock)
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in MISSING:
            pytest.skip(f"no {error.name}")
        raise
