# SPDX-License-Identifier: Apache-2.0
"""The dispatcher: lazy imports, one line per error, and an exit status that names its cause."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import signal
import subprocess
import sys
import types

import pytest

from recipe.async_pipeline.cli import main
from recipe.async_pipeline.console import EXIT_OK, EXIT_OURS, EXIT_USERS
from recipe.async_pipeline.errors import (
    AsyncPipelineError,
    ConfigError,
    PatchedVerlRequired,
    PatchError,
    WeightSyncError,
)


@pytest.fixture
def subcommand(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Add a subcommand `fake` to the table."""
    module = types.ModuleType("fake_subcommand")
    module.add_arguments = lambda parser: parser.add_argument("--status", type=int, default=0)  # type: ignore[attr-defined]
    module.run = lambda args: args.status  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(main.SUBCOMMANDS, "fake", main.Subcommand(module.__name__, "a fake"))
    return module


def test_output_without_a_reader_ends_a_command_without_a_traceback() -> None:
    """As `async-pipeline explain --knobs | head -1` does."""
    command = [sys.executable, "-m", "recipe.async_pipeline", "explain", "--knobs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (EXIT_OURS, "")


def test_another_broken_pipe_is_an_error(
    subcommand: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(args: argparse.Namespace) -> int:
        raise BrokenPipeError("a socket")

    monkeypatch.setattr(subcommand, "run", fails)
    with pytest.raises(BrokenPipeError, match="a socket"):
        main.main(["fake"])


def test_a_terminated_subcommand_can_clean_up(subcommand: types.ModuleType) -> None:
    cleaned: list[str] = []

    def run(args: argparse.Namespace) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            cleaned.append("all")
        return 0

    before = signal.getsignal(signal.SIGTERM)
    subcommand.run = run  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as caught:
        main.main(["fake"])
    assert (caught.value.code, cleaned) == (143, ["all"])
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_is_one_line(subcommand: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    subcommand.run = run  # type: ignore[attr-defined]
    assert main.main(["fake"]) == 130
    assert capsys.readouterr().err == "async-pipeline fake: interrupted\n"


@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_status_is_that_of_the_subcommand(subcommand: types.ModuleType, status: int) -> None:
    assert main.main(["fake", "--status", str(status)]) == status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("k"), EXIT_USERS),
        (PatchError("k"), EXIT_USERS),
        (PatchedVerlRequired("k"), EXIT_USERS),
        (WeightSyncError("k"), EXIT_OURS),
        (AsyncPipelineError("k"), EXIT_OURS),
    ],
)
def test_an_error_of_this_package_is_one_line(
    subcommand: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
    error: AsyncPipelineError,
    status: int,
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    subcommand.run = fail  # type: ignore[attr-defined]
    assert main.main(["fake"]) == status
    assert capsys.readouterr().err == "async-pipeline fake: k\n"


def test_a_package_that_is_not_installed_is_one_line(
    subcommand: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        importlib.import_module("a_package_of_nobody.part")
        return 0

    subcommand.run = run  # type: ignore[attr-defined]
    assert main.main(["fake"]) == EXIT_USERS
    said = capsys.readouterr().err
    assert said.startswith("async-pipeline fake: it needs a_package_of_nobody, which is not installed for ")
    assert len(said.splitlines()) == 1


def test_a_module_of_this_package_that_is_gone_is_a_bug(subcommand: types.ModuleType) -> None:
    def run(args: argparse.Namespace) -> int:
        importlib.import_module("recipe.async_pipeline.gone")
        return 0

    subcommand.run = run  # type: ignore[attr-defined]
    with pytest.raises(ModuleNotFoundError):
        main.main(["fake"])


def test_any_other_error_propagates(subcommand: types.ModuleType) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise KeyError("a bug")

    subcommand.run = fail  # type: ignore[attr-defined]
    with pytest.raises(KeyError, match="a bug"):
        main.main(["fake"])


@pytest.mark.parametrize(
    "arguments", [[], ["nothing"], ["patch"], ["patch", "nothing"], ["doctor", "--nothing"]]
)
def test_wrong_usage_is_a_user_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main.main(arguments)
    assert exit_info.value.code == EXIT_USERS
    assert "usage:" in capsys.readouterr().err


def test_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main.main(["--help"])
    assert exit_info.value.code == EXIT_OK
    shown = capsys.readouterr().out
    assert all(name in shown for name in main.SUBCOMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["patch", "--help"], ["doctor", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom recipe.async_pipeline.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'verl', 'ray', 'vllm'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_python_dash_m_is_the_same_command() -> None:
    command = [sys.executable, "-m", "recipe.async_pipeline", "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("usage: async-pipeline")


def test_version_prints_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main.main(["--version"])
    assert capsys.readouterr().out == f"async-pipeline {importlib.metadata.version('async_pipeline')}\n"
