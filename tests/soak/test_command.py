# SPDX-License-Identifier: Apache-2.0
"""Options, and what is checked before anything starts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.soak import command, faults


def test_faults_are_chosen_by_name() -> None:
    assert command.kinds_of("all") == tuple(faults.FAULTS)
    assert command.kinds_of("burst, kill_run,burst") == ("burst", "kill_run")
    with pytest.raises(ConfigError, match="--faults: there is no 'earthquake'; choose from kill_engine, "):
        command.kinds_of("burst,earthquake")


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(list(words))


def test_options_that_cannot_be_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ConfigError, match="--minutes must be at least 1, got 0.5"):
        command.run(parsed("--minutes", "0.5"))
    with pytest.raises(ConfigError, match="is not empty; name another folder"):
        command.run(parsed("--logs", str(tmp_path)))
    with pytest.raises(ConfigError, match="mine/logs cannot be made"):
        command.run(parsed("--logs", str(tmp_path / "mine" / "logs")))


def test_the_help_names_every_fault() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert all(name in parser.format_help() for name in faults.FAULTS)
