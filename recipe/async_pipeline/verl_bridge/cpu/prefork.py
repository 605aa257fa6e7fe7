# SPDX-License-Identifier: Apache-2.0
"""On CPU, import an engine for the processes of its core while the server's process imports it.

Each import takes about 12 s of a core, and a restarted replica serves only after both. Engines spawn these
processes when the server is ready, so the imports run one after the other.

Here the server's process starts a fork server first, which imports and waits; the processes are forked from
it. `begin` runs before all slow imports, in processes started for a server, which have `EARLY` in their
environment. If the server's process is itself a fork of one that has made the imports
(`cpu/fork_worker.py`), so is the fork server. Not used with accelerators, whose libraries do not survive a
fork.

Imports neither verl nor an engine by itself.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from threading import Event
from typing import Any

from ...errors import EngineDeadError
from ...processes import end_with_parent

EARLY = "ASYNC_PIPELINE_EARLY_ENGINE"
"""Environment variable of a server's process: the name of its engine."""
FIRST = "recipe.async_pipeline.verl_bridge.cpu.prefork_first"
IMPORTS: Mapping[str, Sequence[str]] = {
    "vllm": ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"),
    "sglang": (
        "recipe.async_pipeline.verl_bridge.rollout.sglang.scheduler",
        "sglang.srt.managers.scheduler",
        "sglang.srt.managers.detokenizer_manager",
    ),
}
"""By engine, what the processes of its core import."""
_begun = Event()


def begin(environment: MutableMapping[str, str] = os.environ) -> None:
    """Start the fork server if this is a rollout server's process. Does not wait for it."""
    # Child processes are not servers.
    engine = environment.pop(EARLY, None)
    if engine is None:
        return
    imports = IMPORTS.get(engine, ())
    # Otherwise Python before 3.10.9 listens on a socket through which every user of this machine can
    # execute code in this process (CVE-2022-42919).
    setattr(util, "abstract_sockets_supported", False)  # noqa: B010 - typeshed calls it final
    forkserver.set_forkserver_preload([FIRST, *imports])
    # With these imports the process is a fork that has not started threads yet.
    with _forks() if imports and all(name in sys.modules for name in imports) else nullcontext():
        forkserver.ensure_running()
    _begun.set()


@contextmanager
def _forks() -> Iterator[None]:
    """Let the fork server be a fork of this process rather than a new interpreter."""

    def fork(path: Any, arguments: Any, descriptors: Sequence[int]) -> int:
        if pid := os.fork():
            return pid
        status = 1
        try:
            # Its processes spawn others: vLLM one for each rank.
            util.spawnv_passfds = spawn
            # The pipe whose end would end it is also open here.
            end_with_parent()
            listener, alive = descriptors
            forkserver.main(listener, alive, preload=[])
        except SystemExit:
            status = 0
        except Exception:  # noqa: BLE001  the frames of the parent must not handle it
            traceback.print_exc()
        finally:
            os._exit(status)

    resource_tracker.ensure_running()  # otherwise `ensure_running` spawns it too
    spawn = util.spawnv_passfds
    setattr(util, "spawnv_passfds", fork)  # noqa: B010 - typeshed calls it a function of fixed names
    try:
        yield
    finally:
        util.spawnv_passfds = spawn


def begun() -> bool:
    """Return whether a fork server was started, so that the engine of this process is to use it."""
    return _begun.is_set()


def forking(vllms_own: Callable[[], Any]) -> Callable[[], ForkServerContext]:
    """Return vLLM's `get_mp_context`, but with the fork server that `begin` has started."""

    def context() -> ForkServerContext:
        vllms_own()  # it also sets variables for child processes
        return Context()

    return context


def forking_module(multiprocessing: Any) -> ForkServerContext:
    """Return what takes the place of the module `multiprocessing` in one of SGLang's."""
    return Context()


class _Process(ForkServerProcess):
    """Runs with the environment of its creator, which has changed since the fork server was started."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def start(self) -> None:
        """Raises EngineDeadError if the fork server, or the new process, ends meanwhile."""
        try:
            super().start()
        except (EOFError, ConnectionError) as error:
            raise EngineDeadError(
                f"the fork server ended while it started {self.name}; its traceback above has the reason, "
                "unless the kernel killed it"
            ) from error

    def run(self) -> None:
        end_with_parent()
        with suppress(ImportError):
            from setproctitle import getproctitle

            # The engine will set the title; finding its memory requires the variables that are still there
            getproctitle()
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class Context(ForkServerContext):
    """A context of `multiprocessing` whose processes are forked from the fork server."""

    Process = _Process

    def set_start_method(self, method: str | None, force: bool = False) -> None:
        """Keep the start method, whatever an engine asks for."""


def started_early(server_class: Any, engine: str) -> Any:
    """Wrap a Ray actor class so that its processes call `begin`. For the one place where verl uses it."""
    return _Early(server_class, engine)


class _Early:
    def __init__(self, server_class: Any, engine: str) -> None:
        self._class, self._engine = server_class, engine

    def options(self, *, runtime_env: dict[str, Any], **options: Any) -> Any:
        variables = {**runtime_env.get("env_vars", {}), EARLY: self._engine}
        return self._class.options(runtime_env={**runtime_env, "env_vars": variables}, **options)
