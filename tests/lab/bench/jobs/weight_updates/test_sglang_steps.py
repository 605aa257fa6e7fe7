# SPDX-License-Identifier: Apache-2.0
"""Steps of SGLang's scheduler are recorded once, for any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.async_pipeline.lab.bench.jobs.weight_updates.sglang_steps import timed_scheduler
from recipe.async_pipeline.lab.bench.measuring.spans import SPANS_DIR, of_this_job, read_spans
from recipe.async_pipeline.lab.bench.measuring.stalls import STEP


class Group:
    """Of SGLang's ranks."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank


class Scheduler:
    """The one method of SGLang's that is timed."""

    def __init__(self, rank: int) -> None:
        self.tp_cpu_group = Group(rank)

    def run_batch(self, batch: str, proxy: str | None = None) -> str:
        if batch == "broken":
            raise RuntimeError("no memory")
        return f"{batch} {proxy}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(SPANS_DIR, str(tmp_path))
    of_this_job.cache_clear()
    yield tmp_path
    of_this_job.cache_clear()


def test_the_first_rank_records_its_steps(folder: Path) -> None:
    scheduler = timed_scheduler(Scheduler)(0)
    assert scheduler.run_batch("one", proxy="p") == "one p"
    with pytest.raises(RuntimeError, match="no memory"):
        scheduler.run_batch("broken")
    found = read_spans(folder)
    assert [(span.name, span.facts) for span in found] == [(STEP, {"pid": os.getpid()})] * 2


def test_the_other_ranks_record_nothing(folder: Path) -> None:
    assert timed_scheduler(Scheduler)(1).run_batch("one") == "one None"
    assert read_spans(folder) == []
