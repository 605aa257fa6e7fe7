# SPDX-License-Identifier: Apache-2.0
"""The lake plays as usual, and misbehaves for one episode in four on request."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from recipe.async_pipeline.lab.soak import moods


def test_the_lake_misbehaves_in_one_episode_in_four(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    control = tmp_path / "mood"
    lake = moods.MoodyLake(control=str(control))

    def outcomes() -> list[str]:
        found = []
        for _ in range(moods.ONE_IN):
            lake.reset(0)
            lake.step("L")
            try:
                lake.step("L")
                found.append("played")
            except RuntimeError as error:
                found.append(str(error))
        return sorted(found)

    assert outcomes() == ["played"] * moods.ONE_IN
    control.write_text("raise")
    assert outcomes() == [*["played"] * (moods.ONE_IN - 1), "the control file requests an exception"]


def test_a_process_that_is_to_die_dies(tmp_path: Path) -> None:
    control = tmp_path / "mood"
    control.write_text("die")
    child = os.fork()
    if child == 0:
        moods.misbehave(control)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "mood.seen").exists()
    control.write_text("")
    assert moods.misbehave(control) == ""
