# SPDX-License-Identifier: Apache-2.0
"""Run `async-pipeline` several times, as forks of one process that has imported verl. Run as a script.

Reads a JSON list of commands, each a list of words, and prints the status, stdout and stderr of each as JSON.
"""

from __future__ import annotations

import io
import json
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from functools import partial

from recipe.async_pipeline.cli.main import main
from tests.fakes.forked_ranks import fork_ranks


def run(commands: list[list[str]], number: int) -> None:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(commands[number])
    sys.stdout.write(json.dumps([status, out.getvalue(), err.getvalue()]))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import recipe.async_pipeline.verl_bridge.launch.prepare  # noqa: F401
    read: list[list[str]] = json.load(sys.stdin)
    printed = fork_ranks(partial(run, read), range(len(read))).values()
    sys.stdout.write("\nREPORT [" + ", ".join(printed) + "]\n")
