# SPDX-License-Identifier: Apache-2.0
"""On CPU, the process of vLLM's engine core imports vLLM while its server's process imports it too, instead
of after it.

Each import takes some 12 s of a core, and a replica that died serves again only after both. vLLM's own way, a
process
that is spawned when the server is ready, does them one after the other.

So a server's process begins with a fork server (`engine_home`), which imports and waits; the engine core is
forked from
it. `begin` is called before anything is imported that takes time, in processes that were started for a
server: they have
`EARLY` in their environment. Not with accelerators, whose libraries do not outlive a fork.

Imports neither verl nor vLLM by itself.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from contextlib import suppress
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from threading import Event
from typing import Any

from ....processes import end_with_parent

EARLY = "ASYNC_PIPELINE_EARLY_ENGINE"
HOME = "recipe.async_pipeline.verl_bridge.rollout.vllm.prefork_imports"
_begun = Event()


def begin(environment: MutableMapping[str, str] = os.environ) -> None:
    """Start the fork server, if this process is a rollout server's; it is not waited for."""
    # Those who are started from here are not servers.
    if environment.pop(EARLY, None) is None:
        return
    # Else Python before 3.10.9 listens where every user of this machine can have it run anything
    # (CVE-2022-42919).
    setattr(util, "abstract_sockets_supported", False)  # noqa: B010 - typeshed calls it final
    forkserver.set_forkserver_preload([HOME])
    forkserver.ensure_running()
    _begun.set()


def use() -> None:
    """Have vLLM fork its engine core from there, if there is such a process."""
    if not _begun.is_set():
        return
    from vllm.v1.engine import utils

    vllms_own = utils.get_mp_context

    def context() -> ForkServerContext:
        vllms_own()  # it also sets variables for the processes to come
        return _Context()

    utils.get_mp_context = context


class _Process(ForkServerProcess):
    """Has the environment of the one who made it, which has changed since the fork server was started."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        end_with_parent()
        with suppress(ImportError):
            from setproctitle import getproctitle

            # vLLM will set it; where it is kept is found by way of the variables that are still there
            getproctitle()
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Context(ForkServerContext):
    Process = _Process


def started_early(server_class: Any) -> Any:
    """A Ray actor class whose processes are told to `begin`; for the one call that verl makes of it."""
    return _Early(server_class)


class _Early:
    def __init__(self, server_class: Any) -> None:
        self._class = server_class

    def options(self, *, runtime_env: dict[str, Any], **options: Any) -> Any:
        variables = {**runtime_env.get("env_vars", {}), EARLY: "1"}
        return self._class.options(runtime_env={**runtime_env, "env_vars": variables}, **options)
