# SPDX-License-Identifier: Apache-2.0
"""On CPU, import vLLM for the engine core's process while the server's process imports it.

Each import takes about 12 s of a core, and a restarted replica serves only after both. vLLM spawns the
engine core when the server is ready, so the two imports run one after the other.

Here the server's process starts a fork server first (`prefork_imports`), which imports and waits; the
engine core is forked from it. `begin` runs before all slow imports, in processes started for a server,
which have `EARLY` in their environment. If the server's process is itself a fork of one that has made the
imports (`cpu/fork_worker.py`), so is the fork server. Not used with accelerators, whose libraries do not
survive a fork.

Imports neither verl nor vLLM by itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from threading import Event
from typing import Any

from ....processes import end_with_parent
from ... import replaced

EARLY = "ASYNC_PIPELINE_EARLY_ENGINE"
HOME = "recipe.async_pipeline.verl_bridge.rollout.vllm.prefork_imports"
IMPORTS = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")
"""What engine cores import."""
_begun = Event()


def begin(environment: MutableMapping[str, str] = os.environ) -> None:
    """Start the fork server if this is a rollout server's process. Does not wait for it."""
    # Child processes are not servers.
    if environment.pop(EARLY, None) is None:
        return
    # Otherwise Python before 3.10.9 listens on a socket through which every user of this machine can
    # execute code in this process (CVE-2022-42919).
    setattr(util, "abstract_sockets_supported", False)  # noqa: B010 - typeshed calls it final
    forkserver.set_forkserver_preload([HOME])
    # With these imports the process is a fork that has not started threads yet.
    with _forks() if all(name in sys.modules for name in IMPORTS) else nullcontext():
        forkserver.ensure_running()
    _begun.set()


@contextmanager
def _forks() -> Iterator[None]:
    """Let the fork server be a fork of this process rather than a new interpreter."""

    def fork(path: Any, arguments: Any, descriptors: Sequence[int]) -> int:
        if pid := os.fork():
            return pid
        try:
            # The pipe whose end would end it is also open here.
            end_with_parent()
            listener, alive = descriptors
            forkserver.main(listener, alive, preload=[])
        finally:
            os._exit(0)

    resource_tracker.ensure_running()  # otherwise `ensure_running` spawns it too
    spawn = util.spawnv_passfds
    setattr(util, "spawnv_passfds", fork)  # noqa: B010 - typeshed calls it a function of fixed names
    try:
        yield
    finally:
        util.spawnv_passfds = spawn


def use() -> None:
    """Have vLLM fork its engine core from the fork server, if one was started."""
    if not _begun.is_set():
        return
    replaced.apply("vLLM's server")


def forking(vllms_own: Callable[[], Any]) -> Callable[[], ForkServerContext]:
    """Return vLLM's `get_mp_context`, but with the fork server that `begin` has started."""

    def context() -> ForkServerContext:
        vllms_own()  # it also sets variables for child processes
        return _Context()

    return context


class _Process(ForkServerProcess):
    """Runs with the environment of its creator, which has changed since the fork server was started."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        end_with_parent()
        with suppress(ImportError):
            from setproctitle import getproctitle

            # vLLM will set the title; finding its memory requires the variables that are still there
            getproctitle()
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Context(ForkServerContext):
    Process = _Process


def started_early(server_class: Any) -> Any:
    """Wrap a Ray actor class so that its processes call `begin`. For the one place where verl uses it."""
    return _Early(server_class)


class _Early:
    def __init__(self, server_class: Any) -> None:
        self._class = server_class

    def options(self, *, runtime_env: dict[str, Any], **options: Any) -> Any:
        variables = {**runtime_env.get("env_vars", {}), EARLY: "1"}
        return self._class.options(runtime_env={**runtime_env, "env_vars": variables}, **options)
